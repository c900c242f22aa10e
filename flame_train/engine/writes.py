"""What was written in place, and when: how a node notices that a tensor it saved has changed since.

Running an op notes nothing. Writes are rare, and only nodes older than the last write look them up.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

from .backend import extent, owner
from .dtype import Array

SEQUENCE = itertools.count()
"""One clock for both the making of nodes and the writing of memory."""

_MANY = 64  # parts of one allocation that are told apart; beyond it they are merged into one

Part = tuple[int, int]
"""A stretch of memory: its first address and the one after its last."""


class Writes:
    """When each part of the allocations that are still alive was last written.

    `last` is the time of the latest write, -1 before the first.
    """

    def __init__(self) -> None:
        self.last = -1
        self._parts: dict[int, dict[Part, int]] = {}
        self._owners: dict[int, weakref.ref[Array]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, array: Array) -> None:
        """Records that `array` is being written."""
        self.last = next(SEQUENCE)
        whole = owner(array)
        place = id(whole)
        if place not in self._owners:
            self._parts[place] = {}
            self._owners[place] = weakref.ref(whole, lambda _: self._forget(place))
        parts = self._parts[place]
        parts[extent(array)] = self.last
        if len(parts) > _MANY:
            self._parts[place] = {(min(b for b, _ in parts), max(e for _, e in parts)): self.last}

    def since(self, when: int, arrays: Iterable[Array]) -> bool:
        """Whether one of `arrays` was written after `when`."""
        return any(
            then > when and begin < last and first < end
            for array in arrays
            if id(whole := owner(array)) in self._parts
            for first, last in [extent(array)]
            for (begin, end), then in self._parts[id(whole)].items()
        )

    def _forget(self, place: int) -> None:
        del self._owners[place], self._parts[place]


WRITES = Writes()
