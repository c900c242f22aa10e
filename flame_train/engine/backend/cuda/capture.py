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

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any, Protocol

from ...mode import capturing
from .launcher import Launcher


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
    """`fn` as a callable that records itself once and replays from then on."""
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
        stream = self._backend.stream
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
