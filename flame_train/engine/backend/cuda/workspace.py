"""The memory pools of a GPU, and one buffer that all large workspaces share, since work is on one stream.

The gradients of deterministic attention need a workspace of gigabytes. Allocated and freed in the middle of a step,
such a block leaves a hole that smaller arrays settle in. So the next one does not fit there any more. Steps took
that much more memory than was ever in use at once. So the buffer is kept, and a graph allocates it before all else.
"""

from __future__ import annotations

import weakref
from typing import Any

from ...mode import mode


class Pools:
    """Makes CuPy's memory pools, and refuses to let them have more than `limit` bytes of the device together.

    A pool asks here for whole blocks, rarely; what it gives out of its blocks is not seen.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._made: list[Any] = []
        self.limit = 0
        """Bytes; 0: as many as the device has."""

    def make(self) -> Any:
        """Returns a new pool."""
        pool = self._cupy.cuda.MemoryPool(self._block)
        self._made.append(pool)
        return pool

    def keep_while(self, owner: object, pool: Any) -> None:
        """The pool is gone when `owner` is."""
        weakref.finalize(owner, self._made.remove, pool).atexit = False

    def total_bytes(self) -> int:
        """Returns what all pools have of the device, their unused blocks included."""
        return sum(int(pool.total_bytes()) for pool in self._made)

    def _block(self, size: int) -> Any:
        """A block of the device's memory; the pool that asks counts it already. Raises CuPy's OutOfMemoryError."""
        cuda, taken = self._cupy.cuda, self.total_bytes()
        if self.limit and taken > self.limit:
            raise cuda.memory.OutOfMemoryError(size, taken - size, self.limit)
        return cuda.MemoryPointer(cuda.Memory(size), 0)


_LARGE = 512 << 20  # bytes; smaller workspaces do no harm and are allocated each time, where there is no buffer yet


class Workspace:
    """The shared buffer, as large as the largest workspace so far."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.buffer: Any = None  # the buffer in use
        self._most = 0
        self._known: list[Any] = []  # buffers that captured graphs write to, kept alive for them

    def get(self, size: int) -> Any:
        """Returns an array of at least `size` bytes, valid for work that is queued before the next call."""
        if size < _LARGE and (self.buffer is None or self.buffer.nbytes < size):
            return self._cupy.empty(max(1, size), "uint8")
        self._most = max(self._most, size)
        return self.reserve()

    def reserve(self) -> Any:
        """The buffer, as large as the largest workspace so far; None if there was none. Captures keep it alive."""
        if self.buffer is None or self.buffer.nbytes < self._most:
            self.buffer = None  # freed before the larger one is allocated
            self.buffer = self._cupy.empty(self._most, "uint8") if self._most else None
        if mode().capturing and self.buffer is not None and not any(r is self.buffer for r in self._known):
            self._known.append(self.buffer)
        return self.buffer

    def release(self) -> None:
        """Frees all buffers. No graph may be alive."""
        self.buffer = None
        self._known.clear()

    def forget(self) -> None:
        """Forgets the buffer, and its largest size: other work begins, such as training after encoding."""
        self.release()
        self._most = 0
