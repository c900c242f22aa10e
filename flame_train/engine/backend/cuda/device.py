"""Device, stream and memory: what the engine needs of a GPU besides kernels."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from ....errors import EnvironmentFault, HostRead, is_out_of_memory
from ...dtype import Array, DType, HostBytes
from ...mode import mode
from ..base import Memory
from ..capability import refuse_too_old
from .capture import Graph, capture
from .host_copies import HostCopies, PinnedCopy
from .launcher import CapturableNamespace, Launcher
from .libraries.nccl import NcclCollectives, unique_identifier
from .prefetch import CudaUploader
from .staging import LEAST, Staging
from .workspace import Pools

_HINT = "use --device cpu, or run `flame-train doctor` to see what is missing"


class CudaBackend:
    """One GPU, one stream, one memory pool. All work of all threads is queued on the one stream."""

    asynchronous = True
    described = False

    def __init__(self, cupy: Any = None, launcher: type[Launcher] = Launcher, index: int = 0) -> None:
        """`cupy` and `launcher` are of a described GPU where that is run on shapes alone (`described.py`)."""
        cupy = cupy or _import_cupy(index)
        self.xp: ModuleType = cupy
        self.index, self.name = index, f"cuda:{index}" if index else "cuda"
        self._alone = index == 0  # no other GPU is in use, so that this one is current already
        if index:
            cupy.cuda.Device(index).use()
        # A blocking stream: CuPy makes some copies on the null stream, and only with such a stream are they in order.
        self.stream = cupy.cuda.Stream()
        self._pools = Pools(cupy)
        self._pool, self.graph_pool = self._pools.make(), self._pools.make()
        self.graphs = weakref.WeakSet[Any]()  # steps whose graphs are alive, and may write anywhere in `graph_pool`
        self._pinned, self._graph_pinned = cupy.cuda.PinnedMemoryPool(), cupy.cuda.PinnedMemoryPool()
        self._host_copies = HostCopies(cupy, self.stream, self.empty)
        self._staging = Staging(cupy, self.stream, self.enter_thread)
        self.once_bytes = 0
        """The most that `run_once` took under a limit, for which captured steps leave room."""
        self.program = 0
        self._apart = False
        self._peak = self._in_graphs = 0
        cupy.cuda.set_allocator(self._malloc)
        self.enter_thread()
        self.kernels = launcher(cupy, self.stream)
        self.references = CapturableNamespace(self.kernels)

    @property
    def card(self) -> str:
        return _name(self.xp, self.index)

    @property
    def pci_bus_id(self) -> str:
        return str(self.xp.cuda.runtime.deviceGetPCIBusId(self.index))

    def enter_thread(self) -> None:
        """Makes the stream current in this thread if it is not.

        CuPy keeps a current stream per thread, and leaving any `with stream:` block, ours or another library's, makes
        the null stream current again. Being called at every op, this keeps all work in one order.
        """
        if not self._alone and self.xp.cuda.runtime.getDevice() != self.index:
            self.xp.cuda.Device(self.index).use()
        if self.xp.cuda.get_current_stream() is not self.stream:
            self.stream.use()

    def beside_others(self) -> None:
        """Another GPU is used too, so that this one may have to be made current again."""
        self._alone = False

    def _malloc(self, size: int) -> Any:
        memory = self._taken(self._pool, size)
        self._peak = max(self._peak, self._pool.used_bytes() + self._in_graphs)
        return memory

    def _graph_malloc(self, size: int) -> Any:
        return self._taken(self.graph_pool, size)

    def _taken(self, pool: Any, size: int) -> Any:
        """Memory of a pool; where the device has no more, what the other pool keeps unused is given back first."""
        try:
            return pool.malloc(size)
        except self.xp.cuda.memory.OutOfMemoryError:
            if mode().capturing:  # nothing can be given back now
                raise
        self.free_unused()
        return pool.malloc(size)

    def malloc(self, size: int) -> Any:
        """Device memory that tensors are kept in."""
        return self._malloc(size)

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        self.enter_thread()
        return self.xp.empty(tuple(shape), dtype)

    def to_device(self, host: np.ndarray[Any, Any]) -> Array:
        """Returns a copy on the device. Memory order is kept: a transposed view stays one."""
        return self.begin_upload(host)()

    def begin_upload(self, host: np.ndarray[Any, Any]) -> Callable[[], Array]:
        """Starts what `to_device` does; a call of the result gives the array, and until then `host` must stay."""
        _refuse_in_capture("copies nothing in from the host", "make this tensor before the step")
        order = sorted(range(host.ndim), key=lambda i: -host.strides[i])
        dense = host.transpose(order)
        if not dense.flags.c_contiguous:
            order, dense = list(range(host.ndim)), np.ascontiguousarray(host)
        with self.xp.cuda.using_allocator(self._malloc):  # never from the graphs' pool: it may outlive this step
            array = self.empty(dense.shape, dense.dtype)
        result = array.transpose([order.index(i) for i in range(host.ndim)])
        if dense.nbytes < LEAST or self.described:
            array.set(dense, stream=self.stream)
            return lambda: result
        wait = self._staging.begin(array.data.ptr, dense)

        def arrived() -> Array:
            wait()
            return result

        return arrived

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        _refuse_in_capture("reads nothing back to the host", "move this read out of the step")
        self.enter_thread()
        result: np.ndarray[Any, Any] = array.get(stream=self.stream)
        return result

    def get_async(self, array: Array) -> Callable[[], np.ndarray[Any, Any]]:
        _refuse_in_capture("reads nothing back to the host", "move this read out of the step")
        held = self.xp.cuda.alloc_pinned_memory(array.nbytes)
        host = np.frombuffer(held, array.dtype, array.size).reshape(array.shape)
        array.get(stream=self.stream, out=host, blocking=False)
        done = self.stream.record()

        def wait() -> np.ndarray[Any, Any]:
            done.synchronize()
            return host.copy()

        return wait

    def offload(self, array: Array, *, keep: bool = False) -> PinnedCopy:
        if keep:
            _refuse_in_capture("keeps no memory", "offload for good before the step")
        # A captured step's memory is kept apart as on the device: nothing else may lie where a replay writes.
        pool = None if keep else self._graph_pinned if self._apart else self._pinned
        return self._host_copies.of(self.kernels.contiguous(array), pool)

    def keep_in(self, memory: HostBytes, array: Array | None) -> PinnedCopy:
        _refuse_in_capture("keeps no memory", "offload for good before the step")
        return self._host_copies.within(memory, None if array is None else self.kernels.contiguous(array))

    @property
    def host_bytes(self) -> int:
        return self._host_copies.kept_bytes

    def write(self, target: Array, host: np.ndarray[Any, Any]) -> None:
        _refuse_in_capture("copies nothing in from the host", "write before the step")
        target.set(np.asarray(host, order="C"), stream=self.stream)

    def uploader(self) -> CudaUploader:
        pool = self._pools.make()  # its own, so that no kernel of the stream has used its memory
        made = CudaUploader(self.xp, self.stream, self.enter_thread, lambda size: self._taken(pool, size))
        self._pools.keep_while(made, pool)
        return made

    def synchronize(self) -> None:
        _refuse_in_capture("waits for nothing", "synchronize after the step")
        self.stream.synchronize()

    def wait_side_stream(self) -> None:
        self.kernels.side_stream.join()
        self._host_copies.join()

    def forget_side_streams(self) -> None:
        """Drops what a failed capture left."""
        self.kernels.side_stream.forget()
        self._host_copies.forget()

    def begin_program(self) -> None:
        """A captured step begins or ends: copies from the host that are under way belong to neither side."""
        self._host_copies.join()
        self.program += 1

    def memory(self) -> Memory:
        """Returns what tensors take, and what captured graphs keep for themselves; `total` is the card's memory."""
        total = self.xp.cuda.runtime.memGetInfo()[1]
        self._in_graphs = self.graph_pool.total_bytes()  # walks over the pool, so not done at every allocation
        live = int(self._pool.used_bytes() + self._in_graphs)
        self._peak = max(self._peak, live)
        return Memory(live, self._peak, int(total))

    def free_memory(self) -> int:
        """Bytes that nobody has, this process and others included; what pools keep unused is given back first."""
        self.free_unused()
        return int(self.xp.cuda.runtime.memGetInfo()[0])

    def limit_memory(self, size: int) -> None:
        self._pools.limit = size

    def reset_peak(self) -> None:
        self._peak = 0
        self._peak = self.memory().live

    def watch_peak(self) -> Callable[[], int]:
        """As `Backend.watch_peak`; what a captured step takes comes from the graphs' pool and is not seen."""
        before, peak = int(self._pool.used_bytes() + self._in_graphs), self._peak
        self._peak = before

        def end() -> int:
            most, self._peak = self._peak, max(peak, self._peak)
            return most - before

        return end

    def empty_cache(self) -> None:
        """As `free_unused`; where no graph is alive, the next one gets no room for what earlier work worked in."""
        if not self.graphs:
            self.kernels.workspace.forget()
        self.free_unused()

    def free_unused(self) -> None:
        """Gives the memory of freed tensors back to the device; the graphs' pool, too, if no graph is alive."""
        self.synchronize()
        if not self.graphs:
            self.kernels.workspace.release()
            self.graph_pool.free_all_blocks()
            self._in_graphs = self.graph_pool.total_bytes()
        self._pool.free_all_blocks()

    @contextmanager
    def graph_memory(self) -> Iterator[None]:
        """Inside, this thread allocates from the graphs' pools: device memory, and pinned memory for `offload`."""
        with self.xp.cuda.using_allocator(self._graph_malloc):
            self._apart = True
            try:
                yield
            finally:
                self._apart = False

    def recorded(self) -> Any:
        """Returns what the stream captured, as a graph to launch."""
        return Graph(self.xp, self.stream)

    def run_once(self, fn: Callable[[], None]) -> None:
        if not self._pools.limit:
            fn()
        elif not (self.graphs and self._beside_graphs(fn)):
            most = self.watch_peak()
            try:
                fn()
            finally:
                self.once_bytes = max(self.once_bytes, most())

    def _beside_graphs(self, fn: Callable[[], None]) -> bool:
        """Runs `fn` in the graphs' pool. Where it finds no room there, the graphs are gone, to be recorded again."""
        try:
            self.capture(fn)()  # a first call runs eagerly
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.synchronize()  # a graph must not be destroyed while it runs
        for graph in list(self.graphs):
            graph.forget()
        gc.collect()
        self.free_unused()
        return False

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        return capture(self, fn)

    def nccl_identifier(self) -> bytes:
        """By which processes find each other in `nccl`. With NCCL_COMM_ID=HOST:PORT set, each makes the same one."""
        return unique_identifier(self.xp)

    def nccl(self, rank: int, world: int, identifier: bytes) -> NcclCollectives:
        """Joins `world` processes, one a GPU, of which this is `rank`. Raises EnvironmentFault, DeviceFault."""
        return NcclCollectives(self.xp, self.stream, rank, world, identifier)


def _refuse_in_capture(what: str, instead: str) -> None:
    """Raises RuntimeError while a step is captured."""
    if mode().capturing:
        raise HostRead(f"a captured step {what}: {instead}")


def allocate_by_device(backends: Mapping[int, CudaBackend]) -> None:
    """Lets CuPy take memory for the GPU that is current from that GPU's backend."""
    for backend in backends.values():
        backend.beside_others()
    cuda = next(iter(backends.values())).xp.cuda
    cuda.set_allocator(lambda size: backends[int(cuda.runtime.getDevice())].malloc(size))


def _import_cupy(index: int = 0) -> ModuleType:
    """CuPy with GPU `index` working, or an `EnvironmentFault` that says what is wrong."""
    cupy, count = cupy_and_gpus()
    if index >= count:
        names = [_name(cupy, i) for i in range(count)]
        raise EnvironmentFault(f"cuda:{index} is not there; this machine has {', '.join(names)}")
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    refuse_too_old(_name(cupy, index), (int(properties["major"]), int(properties["minor"])))
    return cupy


def cupy_and_gpus() -> tuple[ModuleType, int]:
    """CuPy and how many GPUs it sees, at least one, or an `EnvironmentFault` that says what is wrong."""
    try:
        import cupy
    except ImportError as e:
        raise EnvironmentFault(
            f"--device cuda needs CuPy, which is not installed ({e}); pip install 'flame-train[cuda13]', or {_HINT}"
        ) from e
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as e:
        raise EnvironmentFault(f"no usable NVIDIA GPU: {e}; {_HINT}") from e
    if count == 0:
        raise EnvironmentFault(f"no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES?); {_HINT}")
    found: ModuleType = cupy
    return found, int(count)


def _name(cupy: ModuleType, index: int) -> str:
    """ "cuda:0 (NVIDIA H100)"."""
    name = cupy.cuda.runtime.getDeviceProperties(index)["name"]
    return f"cuda:{index} ({name.decode() if isinstance(name, bytes) else name})"
