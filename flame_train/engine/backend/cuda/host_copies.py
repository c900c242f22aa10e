"""Copies of arrays in pinned host memory, and the stream on which they come back while other work runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ....errors import DeviceFault
from ...dtype import Array, DType, HostBytes
from ...mode import mode


class SideStream:
    """A second stream, forked from `stream` and joined to it. Outside a capture everything runs on `stream` itself."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._main, self._side = stream, cupy.cuda.Stream(non_blocking=True)
        self._begun, self._done = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self._held: tuple[Array, ...] | None = None

    def run(self, launch: Callable[[], None], *arrays: Array) -> None:
        """Calls `launch` on the branch. It must use no other arrays than these, and allocate no memory."""
        if not mode().capturing:
            launch()
            return
        self.join()
        self._begun.record(self._main)
        self._side.wait_event(self._begun)
        self._side.use()
        try:
            launch()
        finally:
            self._main.use()
        self._held = arrays

    def join(self) -> None:
        """Orders work queued on `stream` from now on after all work of the side stream."""
        if self._held is not None:
            self._done.record(self._side)
            self._main.wait_event(self._done)
            self._held = None

    def forget(self) -> None:
        """Drops what a failed capture left."""
        self._held = None


class HostCopies:
    """Makes `PinnedCopy`s of arrays whose work is queued on the stream `main`."""

    def __init__(self, cupy: Any, main: Any, empty: Callable[[Sequence[int], DType], Array]) -> None:
        self.cuda, self.main, self.empty = cupy.cuda, main, empty
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._forked = False  # whether the stream has work that `main` does not wait for yet
        self.begun_bytes = 0
        """Of all copies that `begin` began, beside other work."""
        self._kept = weakref.WeakSet[PinnedCopy]()

    def of(self, dense: Array, pool: Any) -> PinnedCopy:
        """A copy of a contiguous array, in memory of `pool`; of its own, which counts as kept, if that is None."""
        size = max(int(dense.nbytes), 1)
        made = PinnedCopy(self, dense, self._pinned(size) if pool is None else pool.malloc(size))
        made.store(dense)
        if pool is None:
            self._kept.add(made)
        return made

    def within(self, memory: HostBytes, dense: Array | None) -> PinnedCopy:
        """A copy that counts as kept, in memory that is pinned while it is needed; None: what is there already."""
        made = PinnedCopy(self, memory, self._asked(memory.nbytes, lambda: _Registered(self.cuda.runtime, memory)))
        if dense is not None:
            made.store(dense)
        self._kept.add(made)
        return made

    @property
    def kept_bytes(self) -> int:
        """Of all copies that are kept."""
        return sum(copy.nbytes for copy in self._kept)

    def _pinned(self, size: int) -> Any:
        """Pinned memory outside the pools, which goes back to the system with the array that waits in it."""
        return self._asked(size, lambda: self.cuda.PinnedMemory(size))

    def _asked(self, size: int, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (self.cuda.runtime.CUDARuntimeError, MemoryError) as error:
            raise DeviceFault(
                f"the system refused {size / 2**20:.0f} MiB of pinned host memory, after "
                f"{self.kept_bytes / 2**30:.1f} GiB of it: {error}; free host memory, raise the limit of locked memory "
                "(`ulimit -l`, or a container's memlock), or stream fewer blocks by model.offload"
            ) from error

    def begin(self, out: int, source: int, size: int) -> Callable[[], None]:
        """Starts copying `size` bytes from the host address `source`, once the work queued so far is done.

        Returns what orders later work after the copy. It must be called in the same captured step, if at all.
        """
        begun, arrived = (self.cuda.Event(disable_timing=True) for _ in range(2))
        begun.record(self.main)
        self._stream.wait_event(begun)
        self._forked = True
        self.begun_bytes += size
        runtime = self.cuda.runtime
        runtime.memcpyAsync(out, source, size, runtime.memcpyHostToDevice, self._stream.ptr)
        arrived.record(self._stream)
        return lambda: self.main.wait_event(arrived)

    def join(self) -> None:
        """Orders work queued on `main` from now on after all copies that were begun."""
        if self._forked:
            done = self.cuda.Event(disable_timing=True)
            done.record(self._stream)
            self.main.wait_event(done)
            self._forked = False

    def forget(self) -> None:
        """Drops what a failed capture left."""
        self._forked = False


class _Registered:
    """Memory of the system that is pinned as long as this lives."""

    def __init__(self, runtime: Any, memory: HostBytes) -> None:
        self._runtime, self._memory, self.ptr = runtime, memory, int(memory.ctypes.data)
        runtime.hostRegister(self.ptr, memory.nbytes, 0)

    def __del__(self) -> None:
        """Gives the pages back to the system."""
        with contextlib.suppress(Exception):  # the driver is gone at the end of the process, or refused them
            self._runtime.hostUnregister(self.ptr)


class PinnedCopy:
    """An array's copy in pinned memory; see `base.Offloaded`."""

    __slots__ = ("__weakref__", "_copies", "_dtype", "_held", "_shape", "nbytes")

    def __init__(self, copies: HostCopies, like: Array, held: Any) -> None:
        self._copies, self._held = copies, held
        self._shape, self._dtype, self.nbytes = like.shape, like.dtype, int(like.nbytes)

    def store(self, dense: Array) -> None:
        """Starts copying the array here."""
        runtime, queue = self._copies.cuda.runtime, self._copies.main.ptr
        runtime.memcpyAsync(self._held.ptr, dense.data.ptr, self.nbytes, runtime.memcpyDeviceToHost, queue)

    def reload(self) -> Array:
        out, runtime = self._copies.empty(self._shape, self._dtype), self._copies.cuda.runtime
        runtime.memcpyAsync(
            out.data.ptr, self._held.ptr, self.nbytes, runtime.memcpyHostToDevice, self._copies.main.ptr
        )
        return out

    def fetch(self, out: Array) -> Callable[[], None]:
        return self._copies.begin(out.data.ptr, self._held.ptr, self.nbytes)
