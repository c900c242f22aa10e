"""A step as one CUDA graph.

The first call runs eagerly, so that kernels are compiled and plans are made; the second is captured while it is
recorded, and every later one replays. Memory used inside comes from a pool that only captures use: a block freed
during capture must never reach a tensor outside, or a replay would overwrite it. All graphs share that pool, since
they run one after another on one stream and leave nothing in it that is read later.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...mode import capturing
from .graph import Graph

if TYPE_CHECKING:
    from .device import CudaBackend


_ROUNDS = 5


class Captured:
    """A function as a callable that records itself once and replays from then on."""

    def __init__(self, backend: CudaBackend, fn: Callable[[], None]) -> None:
        self._backend, self._fn = backend, fn
        self._warm = False
        self._graph: Graph | None = None

    def __call__(self) -> None:
        if not self._warm:
            self._fn()
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._record()
        self._graph.launch()

    def times(self, kind_of: Callable[[str], str]) -> dict[str, tuple[int, float]]:
        """(launches, milliseconds) of a replay by kind of kernel, which `kind_of` tells from its name.

        A kind's time is what a replay without it is shorter by; kernels of the kind "" always run. What replays without
        some kernels compute means nothing, and may have reached what the function writes to.
        """
        if self._graph is None:
            raise ValueError("kernel_times: call what was captured twice first: it records itself at the second call")
        kinds: dict[str, list[int]] = defaultdict(list)
        for name, nodes in self._graph.kernels().items():
            kinds[kind_of(name)] += nodes
        whole, found = self._milliseconds(self._graph), {}
        for kind, nodes in kinds.items():
            if kind:
                found[kind] = (len(nodes), whole - self._milliseconds(self._graph.without(nodes)))
        rest = whole - sum(ms for _, ms in found.values())
        return found | {"": (len(kinds[""]), rest)}

    def _milliseconds(self, graph: Graph) -> float:
        """The median of a few launches, each awaited."""
        cuda, stream = self._backend.xp.cuda, self._backend.stream
        graph.launch()  # the first is slower
        marks = []
        for _ in range(_ROUNDS):
            stream.synchronize()
            begin, end = cuda.Event(), cuda.Event()
            begin.record(stream)
            graph.launch()
            end.record(stream)
            marks.append((begin, end))
        stream.synchronize()
        return statistics.median(cuda.get_elapsed_time(*mark) for mark in marks)

    def _record(self) -> Graph:
        cuda = self._backend.xp.cuda
        stream = self._backend.stream
        self._backend.release_unused()  # what the eager run took is better used by the graph
        with cuda.using_allocator(self._backend.graph_pool.malloc), capturing():
            stream.begin_capture()
            try:
                self._fn()
            except BaseException:
                self._abandon(stream)
                raise
            return Graph.captured(self._backend.xp, stream)

    def _abandon(self, stream: Any) -> None:
        """Ends a broken capture so that the stream can be used again; the first error is the one to show."""
        try:
            stream.end_capture()
        except self._backend.xp.cuda.runtime.CUDARuntimeError:
            self._graph = None
