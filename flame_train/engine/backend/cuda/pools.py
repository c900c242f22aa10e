"""The memory pools of one GPU, and what they may take of it together."""

from __future__ import annotations

import weakref
from typing import Any


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
        """A new pool."""
        pool = self._cupy.cuda.MemoryPool(self._block)
        self._made.append(pool)
        return pool

    def keep_while(self, owner: object, pool: Any) -> None:
        """The pool is gone when `owner` is."""
        weakref.finalize(owner, self._made.remove, pool).atexit = False

    def total_bytes(self) -> int:
        """What all pools have of the device, their unused blocks included."""
        return sum(int(pool.total_bytes()) for pool in self._made)

    def _block(self, size: int) -> Any:
        """A block of the device's memory; the pool that asks counts it already. Raises CuPy's OutOfMemoryError."""
        cuda, taken = self._cupy.cuda, self.total_bytes()
        if self.limit and taken > self.limit:
            raise cuda.memory.OutOfMemoryError(size, taken - size, self.limit)
        return cuda.MemoryPointer(cuda.Memory(size), 0)
