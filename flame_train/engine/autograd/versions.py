"""The version counter: when memory was written in place, so that a node notices that a tensor it saved has changed.

Running an op records nothing. Writes are rare, and only nodes older than the last write look them up.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

from ..backend import extent, owner
from ..dtype import Array

SEQUENCE = itertools.count()
"""One clock for the making of nodes and the writing of memory."""

_MANY = 64  # ranges of one allocation that are kept apart; beyond it they are merged into one

Range = tuple[int, int]
"""A stretch of memory: its first address and the one after its last."""


class Versions:
    """When each range of the allocations that are still alive was last written.

    `last` is the time of the latest write, -1 before the first.
    """

    def __init__(self) -> None:
        self.last = -1
        self._ranges: dict[int, dict[Range, int]] = {}
        self._owners: dict[int, weakref.ref[Array]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def mark_written(self, array: Array) -> None:
        """Records that `array` is being written."""
        self.last = next(SEQUENCE)
        allocation = owner(array)
        key = id(allocation)
        if key not in self._owners:
            self._ranges[key] = {}
            self._owners[key] = weakref.ref(allocation, lambda _: self._forget(key))
        ranges = self._ranges[key]
        ranges[extent(array)] = self.last
        if len(ranges) > _MANY:
            self._ranges[key] = {(min(b for b, _ in ranges), max(e for _, e in ranges)): self.last}

    def written_since(self, time: int, arrays: Iterable[Array]) -> bool:
        """Tells whether one of `arrays` was written after `time`."""
        return any(
            written > time and begin < last and first < end
            for array in arrays
            if id(allocation := owner(array)) in self._ranges
            for first, last in [extent(array)]
            for (begin, end), written in self._ranges[id(allocation)].items()
        )

    def _forget(self, key: int) -> None:
        del self._owners[key], self._ranges[key]


VERSIONS = Versions()
