"""A captured graph whose fills are replaced by kernels, so that the driver launches it as a whole.

cuBLASLt and cuDNN clear small workspaces, which a capture records as memset nodes. The driver queues a graph that has
such nodes node by node at every launch, and the host waits whenever some 5000 are queued. A launch took 20 ms and
more, where a graph of kernels alone takes 0.1 ms (docs/log/).
"""

from __future__ import annotations

import ctypes
from typing import Any

from ....errors import DeviceFault

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
    """The nodes that `ask`, one of the driver's list functions, gives for a graph or a node."""
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
