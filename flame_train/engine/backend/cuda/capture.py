"""A step as one CUDA graph.

The first call runs eagerly, so that kernels are compiled and plans are made; the second is captured while it is
recorded, and every later one replays. Memory used inside comes from a pool apart: a block freed during capture must
never reach a tensor outside, or a replay would overwrite it. All graphs share that pool, since they run one after
another on one stream and leave nothing in it that is read later.

Where graphs live, the eager run of another step takes its memory there too: beside theirs it would be a second step's.
That is right as long as nothing of it outlives the run, which is looked at: what is copied from the host, as tables
are at their first use, lies apart. Anything else that stays stands where an earlier graph may write, so those graphs
are recorded anew, around it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...mode import capturing
from .graph import Graph

if TYPE_CHECKING:
    from .device import CudaBackend


def capture(backend: CudaBackend, fn: Callable[[], None]) -> Callable[[], None]:
    """`fn` as a callable that records itself once and replays from then on."""
    return _Captured(backend, fn)


class _Captured:
    def __init__(self, backend: CudaBackend, fn: Callable[[], None]) -> None:
        self._backend, self._fn = backend, fn
        self._needs = -1  # bytes, once it has run
        self._graph: Any = None

    def __call__(self) -> None:
        if self._needs < 0:
            self._needs = self._tried()
            return
        if self._graph is None:
            self._record()
        self._graph.launch(self._backend.stream)

    def forget(self) -> None:
        """Has the step recorded anew when it is called next."""
        self._graph = None
        self._backend.graphs.discard(self)

    def _tried(self) -> int:
        """Runs the step eagerly; the bytes that it took beside those of graphs."""
        backend, pool, scratch = self._backend, self._backend.graph_pool, self._backend.kernels.scratch
        if not backend.graphs:
            return backend.most_taken(self._fn)
        before, room = pool.used_bytes(), scratch.room
        with backend.graph_memory():
            self._fn()
        if scratch.room is not room:  # holds nothing from one op to the next
            before += scratch.room.data.mem.size
        if pool.used_bytes() > before:
            gc.collect()  # who makes plans leaves cycles
        if pool.used_bytes() > before:
            backend.synchronize()  # a graph that is under way is not to be taken apart
            for other in list(backend.graphs):
                other.forget()
        return 0

    def _record(self) -> None:
        stream = self._backend.stream
        self._backend.release_unused()  # what the eager run took is better used by the graph
        self._room()
        with self._backend.graph_memory(), capturing():
            self._backend.kernels.scratch.settle()  # before all else, so that it lies at an end of the room
            stream.begin_capture()
            try:
                self._fn()
            except BaseException:
                self._abandon(stream)
                raise
            self._graph = Graph(self._backend.xp, stream)
        self._backend.graphs.add(self)

    def _room(self) -> None:
        """What the eager run took as one free block, and a fiftieth for what does not fit together.

        A pool that grows piece by piece keeps pieces that fit nothing that comes later: a twentieth of a step of SDXL.
        Without the fiftieth a large workspace may find no place and come on top of all. What a pool holds already is
        where earlier graphs work, for this one to take from.
        """
        pool = self._backend.graph_pool
        if not pool.total_bytes():
            with suppress(self._backend.xp.cuda.memory.OutOfMemoryError):  # in pieces it may still fit
                pool.malloc(self._needs + self._needs // 50)

    def _abandon(self, stream: Any) -> None:
        """Ends a broken capture so that the stream can be used again; the first error is the one to show."""
        self._backend.kernels.beside.forget()
        try:
            stream.end_capture()
        except self._backend.xp.cuda.runtime.CUDARuntimeError:
            self._graph = None
