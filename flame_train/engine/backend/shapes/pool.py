"""CuPy's memory pool without memory: which addresses it would give out, and how much it would have taken.

The rules are those of `cupy.cuda.MemoryPool`: sizes go up to multiples of 512 bytes. The smallest free chunk that is
large enough is cut to size. If there is none, exactly as much is requested of the device. Neighbours that are both free
become one chunk again. So a pool of this kind has the gaps that the real one would have.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

GRAIN: Final = 512
"""Bytes of which every size is a multiple."""

_ASIDE = 1 << 20  # bytes between what was requested of the device at different times, so that it never merges


class Chunk:
    """A stretch of memory of one allocation from the device, in use or free, and its neighbours there."""

    __slots__ = ("after", "before", "free", "ptr", "size")

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr, self.size, self.free = ptr, size, False
        self.before: Chunk | None = None
        self.after: Chunk | None = None


class Block:
    """What arrays share: memory in use. It goes back to its pool with the last array that lies in it."""

    __slots__ = ("_chunk", "_pool", "size")

    def __init__(self, pool: Pool, chunk: Chunk) -> None:
        self._pool, self._chunk, self.size = pool, chunk, chunk.size

    def __del__(self) -> None:
        self._pool._give_back(self._chunk)


class Pointer:
    """An address, and the block in which it lies; as `cupy.cuda.MemoryPointer`."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem: Block | None, ptr: int) -> None:
        self.mem, self.ptr = mem, ptr


NOWHERE = Pointer(None, 0)
"""Where empty arrays lie."""


class Pool:
    """As `cupy.cuda.MemoryPool`, as far as the CUDA backend uses it."""

    _next = 1 << 40  # the next address that the device gives to a pool: no address is ever given twice

    def __init__(self, allocator: Callable[[int], object] | None = None) -> None:
        """`allocator` is called for what is requested of the device, and raises where it gives no more."""
        self._allocator = allocator
        self._used = self._total = 0
        self._sizes: list[int] = []  # of free chunks, ascending, each size once
        self._free: dict[int, dict[Chunk, None]] = {}

    def used_bytes(self) -> int:
        """Of what is in use, rounded up as it is taken."""
        return self._used

    def total_bytes(self) -> int:
        """Of all that was requested of the device and not given back."""
        return self._total

    def malloc(self, size: int) -> Pointer:
        """Returns memory of at least `size` bytes."""
        if not size:
            return NOWHERE
        size = -(-size // GRAIN) * GRAIN
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            self._request(size)
            chunk = Chunk(Pool._next, size)
            Pool._next += size + _ASIDE
        else:
            chunk = next(reversed(self._free[self._sizes[place]]))
            self._take(chunk)
            if chunk.size > size:
                self._split(chunk, size)
        self._used += size
        return Pointer(Block(self, chunk), chunk.ptr)

    def _request(self, size: int) -> None:
        """Counts what is requested of the device before that is asked, as CuPy does; not if it refuses."""
        self._total += size
        if self._allocator is not None:
            try:
                self._allocator(size)
            except MemoryError:
                self._total -= size
                raise

    def free_all_blocks(self) -> None:
        """Gives back to the device what was requested and is free as a whole."""
        for chunk in [c for some in self._free.values() for c in some if c.before is None and c.after is None]:
            self._take(chunk)
            self._total -= chunk.size

    def _split(self, chunk: Chunk, size: int) -> None:
        """Cuts a chunk to `size`; the rest is free."""
        rest = Chunk(chunk.ptr + size, chunk.size - size)
        rest.before, rest.after, chunk.size = chunk, chunk.after, size
        if rest.after is not None:
            rest.after.before = rest
        chunk.after = rest
        self._put(rest)

    def _give_back(self, chunk: Chunk) -> None:
        self._used -= chunk.size
        after, before = chunk.after, chunk.before
        if after is not None and after.free:
            self._take(after)
            self._merge(chunk, after)
        if before is not None and before.free:
            self._take(before)
            self._merge(before, chunk)
            chunk = before
        self._put(chunk)

    @staticmethod
    def _merge(first: Chunk, second: Chunk) -> None:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first

    def _put(self, chunk: Chunk) -> None:
        chunk.free = True
        if chunk.size not in self._free:
            self._free[chunk.size] = {}
            insort(self._sizes, chunk.size)
        self._free[chunk.size][chunk] = None

    def _take(self, chunk: Chunk) -> None:
        chunk.free = False
        some = self._free[chunk.size]
        del some[chunk]
        if not some:
            del self._free[chunk.size], self._sizes[bisect_left(self._sizes, chunk.size)]
