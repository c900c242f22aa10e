"""A step as one CUDA graph.

The first call runs eagerly, so that kernels are compiled and plans are made. The second records the graph and replays
it, and so does every later one without recording. Memory used inside comes from a pool of its own. A block freed
during capture must never reach a tensor outside, or a replay would overwrite it. All graphs share that pool, since
they run one after another on one stream and leave nothing in it that is read later.

Once a graph is alive, the eager first run of another step allocates from that pool as well. Memory outside it would
come on top of the graphs'. This is safe only if nothing it allocates there outlives the run, which is checked
afterwards. (Arrays copied from the host, such as tables made at first use, are never allocated there.) If something
does stay, earlier graphs might overwrite it, so they are dropped, and recorded again around it when next called.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any, Protocol

from ....errors import DeviceFault, is_out_of_memory
from ...mode import capturing
from .launcher import Launcher

_MEMSET = 2  # CUgraphNodeType

_THREADS, _MOST_BLOCKS, _PACKET = 256, 1024, 16

_FILL = """
extern "C" __global__ void fill(unsigned char* to, unsigned long long bytes, unsigned char value) {
  const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  const unsigned long long odd = -(unsigned long long)to & 15, head = odd < bytes ? odd : bytes;
  const unsigned long long packets = (bytes - head) / 16, whole = head + packets * 16;
  const unsigned word = value * 0x01010101u;
  for (unsigned long long i = first; i < packets; i += (unsigned long long)gridDim.x * blockDim.x)
    reinterpret_cast<uint4*>(to + head)[i] = make_uint4(word, word, word, word);
  if (first < head) to[first] = value;
  if (whole + first < bytes) to[whole + first] = value;
}
"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of `size` bytes."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Launch(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


class Graph:
    """What a stream captured, built to be launched again and again."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._runtime = cupy.cuda.runtime
        captured = self._runtime.streamEndCapture(stream.ptr)
        try:
            self._fill = cupy.RawModule(code=_FILL)  # kept as long as the graph calls it
            _fills_as_kernels(captured, self._fill.get_function("fill").kernel.ptr)
            self._built = self._runtime.graphInstantiate(captured)
        finally:
            self._runtime.graphDestroy(captured)
        self._runtime.graphUpload(self._built, stream.ptr)

    def launch(self, stream: Any) -> None:
        """Queues the whole graph on `stream`."""
        self._runtime.graphLaunch(self._built, stream.ptr)

    def __del__(self) -> None:
        if hasattr(self, "_built"):
            self._runtime.graphExecDestroy(self._built)


def _fills_as_kernels(graph: int, function: int) -> None:
    """Replaces each memset node by a launch of `function`, if it is one row that repeats a single byte."""
    driver = ctypes.CDLL("libcuda.so.1")
    for node in _listed(driver.cuGraphGetNodes, graph):
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value != _MEMSET:
            continue
        fill = _Memset()
        _check(driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(fill)))
        if fill.height == 1 and (fill.size == 1 or fill.value == 0):
            _replace(driver, graph, node, function, fill)


def _replace(driver: Any, graph: int, node: int, function: int, fill: _Memset) -> None:
    """Replaces `node` by a kernel that fills the same memory, between the same neighbours."""
    before, after = (_listed(f, node) for f in (driver.cuGraphNodeGetDependencies, driver.cuGraphNodeGetDependentNodes))
    size = fill.width * fill.size
    values = ctypes.c_uint64(fill.to), ctypes.c_uint64(size), ctypes.c_uint8(fill.value)
    places = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
    blocks = max(1, min(_MOST_BLOCKS, -(-size // (_THREADS * _PACKET))))
    launch = _Launch(function, (blocks, 1, 1), (_THREADS, 1, 1), 0, ctypes.addressof(places), None)
    made, whole = ctypes.c_void_p(), ctypes.c_void_p(graph)
    earlier = (ctypes.c_void_p * len(before))(*before)
    adding = driver.cuGraphAddKernelNode
    _check(adding(ctypes.byref(made), whole, earlier, ctypes.c_size_t(len(before)), ctypes.byref(launch)))
    for later in after:
        ends = ctypes.c_void_p(made.value), ctypes.c_void_p(later)
        _check(driver.cuGraphAddDependencies(whole, *map(ctypes.byref, ends), ctypes.c_size_t(1)))
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node)))


def _listed(ask: Any, of: int) -> list[int]:
    """Returns the nodes that `ask`, one of the driver's list functions, gives for a graph or a node."""
    count = ctypes.c_size_t()
    _check(ask(ctypes.c_void_p(of), None, ctypes.byref(count)))
    if not count.value:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    _check(ask(ctypes.c_void_p(of), nodes, ctypes.byref(count)))
    return [n for n in nodes[: count.value] if n is not None]


def _check(status: int) -> None:
    if status:
        raise DeviceFault(f"the driver refused to change a captured graph: error {status}")


class CapturingDevice(Protocol):
    """What capturing asks of `CudaBackend`, whose methods these are."""

    xp: ModuleType
    stream: Any
    kernels: Launcher
    graph_pool: Any
    graphs: weakref.WeakSet[Any]
    once_bytes: int

    def enter_thread(self) -> None: ...
    def watch_peak(self) -> Callable[[], int]: ...
    def graph_memory(self) -> AbstractContextManager[None]: ...
    def free_unused(self) -> None: ...
    def recorded(self) -> Any: ...
    def synchronize(self) -> None: ...
    def begin_program(self) -> None: ...
    def wait_side_stream(self) -> None: ...
    def forget_side_streams(self) -> None: ...


def capture(backend: CapturingDevice, fn: Callable[[], None]) -> Callable[[], None]:
    """Returns `fn` as a callable that records itself once and replays from then on."""
    return _Captured(backend, fn)


class _Captured:
    def __init__(self, backend: CapturingDevice, fn: Callable[[], None]) -> None:
        self._backend, self._fn = backend, fn
        self._needs = -1  # bytes, once it has run
        self._graph: Any = None

    def __call__(self) -> None:
        self._backend.begin_program()
        try:
            self._run()
        finally:
            self._backend.begin_program()

    def _run(self) -> None:
        if self._needs < 0:
            self._needs = self._warm_up()
            return
        if self._graph is None:
            self._record()
        self._backend.enter_thread()
        self._graph.launch(self._backend.stream)

    def forget(self) -> None:
        """Drops the graph; the next call records the step again."""
        self._graph = None
        self._backend.graphs.discard(self)

    def _warm_up(self) -> int:
        """Runs the step eagerly; the most bytes it took outside the graphs' pool."""
        backend, pool, workspace = self._backend, self._backend.graph_pool, self._backend.kernels.workspace
        if not backend.graphs:
            most = backend.watch_peak()
            try:
                self._fn()
            finally:
                needs = most()
            return needs
        before, buffer = pool.used_bytes(), workspace.buffer
        with backend.graph_memory():
            self._fn()
        if workspace.buffer is not buffer:  # a new workspace may stay: it holds nothing from one op to the next
            before += workspace.buffer.data.mem.size
        if pool.used_bytes() > before:
            gc.collect()  # a hook or a library may leave reference cycles
        if pool.used_bytes() > before:
            backend.synchronize()  # a graph must not be destroyed while it runs
            for other in list(backend.graphs):
                other.forget()
        return 0

    def _record(self) -> None:
        try:
            return self._recorded()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._backend.synchronize()  # a graph must not be destroyed while it runs
        for other in list(self._backend.graphs):
            other.forget()
        gc.collect()
        self._backend.begin_program()  # what the host knows of memory's contents is of the recording that failed
        self._recorded()  # the others are recorded again when they are called next

    def _recorded(self) -> None:
        stream = self._backend.stream
        self._backend.enter_thread()  # a pool keeps for each stream apart what it has free
        self._backend.free_unused()  # frees what the eager run took, for the graph
        self._preallocate()
        with self._backend.graph_memory(), capturing():
            self._backend.kernels.workspace.reserve()  # first, so that it lies at one end of the memory
            stream.begin_capture()
            try:
                self._fn()
                self._backend.wait_side_stream()  # a capture ends with all its branches joined
            except BaseException:
                self._abandon(stream)
                raise
            self._graph = self._backend.recorded()
        self._backend.graphs.add(self)

    def _preallocate(self) -> None:
        """Makes what the eager run took one free block of the pool, with a fiftieth more for fragmentation.

        A pool that grows block by block keeps blocks too small for later requests: a twentieth of a step of SDXL.
        Without the fiftieth a large workspace may not fit and be allocated on top. A pool that is not empty is that of
        earlier graphs, whose memory this one shares. Under a limit what `run_once` ran shares it, too.
        """
        pool, needs = self._backend.graph_pool, max(self._needs, self._backend.once_bytes)
        if not pool.total_bytes():
            with suppress(self._backend.xp.cuda.memory.OutOfMemoryError):  # in smaller blocks it may still fit
                pool.malloc(needs + needs // 50)

    def _abandon(self, stream: Any) -> None:
        """Ends a failed capture so that the stream can be used again; errors of this are hidden by the first one."""
        self._backend.forget_side_streams()
        try:
            stream.end_capture()
        except self._backend.xp.cuda.runtime.CUDARuntimeError:
            self._graph = None
