"""A captured graph of kernels alone, which the driver hands to the device whole.

cuBLASLt and cuDNN clear small workspaces, and a capture makes fills of that. With fills among its nodes a graph is
queued node by node at every launch, and the host waits wherever some 5000 are queued: a launch took 20 ms and more,
where one of kernels alone takes 0.1 (docs/log.md). So fills are made kernels before the graph is built.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ....errors import DeviceFault

_KERNEL, _MEMSET = 0, 2  # CUgraphNodeType
_THREADS, _MOST_BLOCKS = 256, 1024
_FILL = """
extern "C" __global__ void fill(unsigned char* to, unsigned long long bytes, unsigned char value) {
  const unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  for (unsigned long long i = first; i < bytes; i += (unsigned long long)gridDim.x * blockDim.x) to[i] = value;
}
"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of `size` bytes."""

    _fields_ = (
        ("to", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("size", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2. A library's kernel has no `function`, but a `kernel`."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class Graph:
    """What a stream captured, built to be launched again and again."""

    def __init__(self, cupy: Any, handle: int, stream: Any) -> None:
        self._cupy, self._handle, self._stream = cupy, handle, stream
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._fill = cupy.RawModule(code=_FILL)  # kept as long as the graph calls it
        _fills_as_kernels(self._driver, handle, self._fill.get_function("fill").kernel.ptr)
        self._built = cupy.cuda.runtime.graphInstantiate(handle)
        cupy.cuda.runtime.graphUpload(self._built, stream.ptr)

    @classmethod
    def captured(cls, cupy: Any, stream: Any) -> Graph:
        """What `stream` has captured, whose capture this ends."""
        return cls(cupy, cupy.cuda.runtime.streamEndCapture(stream.ptr), stream)

    def launch(self) -> None:
        """Queues all of it on the stream that was captured."""
        self._cupy.cuda.runtime.graphLaunch(self._built, self._stream.ptr)

    def kernels(self) -> dict[str, list[int]]:
        """The nodes that are kernels, by the kernels' names."""
        found: dict[str, list[int]] = defaultdict(list)
        for node in _listed(self._driver.cuGraphGetNodes, self._handle):
            if _kind(self._driver, node) == _KERNEL:
                found[_name(self._driver, node)].append(node)
        return found

    def without(self, nodes: Sequence[int]) -> Graph:
        """The same, but for these nodes: what came before each is followed by what came after it."""
        clone = ctypes.c_void_p()
        _check(self._driver.cuGraphClone(ctypes.byref(clone), ctypes.c_void_p(self._handle)))
        copy = clone.value or 0
        for node in nodes:
            twin = ctypes.c_void_p()
            _check(self._driver.cuGraphNodeFindInClone(ctypes.byref(twin), ctypes.c_void_p(node), clone))
            _remove(self._driver, copy, twin.value or 0)
        return Graph(self._cupy, copy, self._stream)

    def __del__(self) -> None:
        runtime = self._cupy.cuda.runtime
        if hasattr(self, "_built"):
            runtime.graphExecDestroy(self._built)
        runtime.graphDestroy(self._handle)


def _kind(driver: Any, node: int) -> int:
    kind = ctypes.c_int()
    _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
    return kind.value


def _name(driver: Any, node: int) -> str:
    """What the kernel of a node is called."""
    launch, name = _Launch(), ctypes.c_char_p()
    _check(driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(launch)))
    of, ask = (launch.function, driver.cuFuncGetName) if launch.function else (launch.kernel, driver.cuKernelGetName)
    _check(ask(ctypes.byref(name), ctypes.c_void_p(of)))
    return (name.value or b"").decode()


def _fills_as_kernels(driver: Any, graph: int, function: int) -> None:
    """Puts a kernel in the place of each fill with one byte."""
    for node in _listed(driver.cuGraphGetNodes, graph):
        if _kind(driver, node) != _MEMSET:
            continue
        fill = _Memset()
        _check(driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(fill)))
        if fill.height == 1 and (fill.size == 1 or fill.value == 0):
            _replace(driver, graph, node, function, fill)


def _neighbours(driver: Any, node: int) -> tuple[list[int], list[int]]:
    """The nodes that a node waits for, and those that wait for it."""
    return _listed(driver.cuGraphNodeGetDependencies, node), _listed(driver.cuGraphNodeGetDependentNodes, node)


def _order(driver: Any, graph: int, first: int, then: int) -> None:
    """Makes one node wait for another."""
    ends = ctypes.c_void_p(first), ctypes.c_void_p(then)
    _check(driver.cuGraphAddDependencies(ctypes.c_void_p(graph), *map(ctypes.byref, ends), ctypes.c_size_t(1)))


def _remove(driver: Any, graph: int, node: int) -> None:
    """Takes a node out of the order of those around it."""
    before, after = _neighbours(driver, node)
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node)))
    for later in after:
        awaited = _neighbours(driver, later)[0]
        for earlier in before:
            if earlier not in awaited:
                _order(driver, graph, earlier, later)


def _replace(driver: Any, graph: int, node: int, function: int, fill: _Memset) -> None:
    before, after = _neighbours(driver, node)
    size = fill.width * fill.size
    values = ctypes.c_uint64(fill.to), ctypes.c_uint64(size), ctypes.c_uint8(fill.value)
    places = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
    blocks = max(1, min(_MOST_BLOCKS, -(-size // _THREADS)))
    launch = _Launch(function, (blocks, 1, 1), (_THREADS, 1, 1), 0, ctypes.addressof(places))
    made, whole = ctypes.c_void_p(), ctypes.c_void_p(graph)
    earlier = (ctypes.c_void_p * len(before))(*before)
    adding = driver.cuGraphAddKernelNode_v2
    _check(adding(ctypes.byref(made), whole, earlier, ctypes.c_size_t(len(before)), ctypes.byref(launch)))
    for later in after:
        _order(driver, graph, made.value or 0, later)
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node)))


def _listed(ask: Any, of: int) -> list[int]:
    """The nodes that one of the driver's lists holds."""
    count = ctypes.c_size_t()
    _check(ask(ctypes.c_void_p(of), None, ctypes.byref(count)))
    if not count.value:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    _check(ask(ctypes.c_void_p(of), nodes, ctypes.byref(count)))
    return [n for n in nodes[: count.value] if n is not None]


def _check(status: int) -> None:
    if status:
        raise DeviceFault(f"the driver refused what was asked of a captured graph: error {status}")
