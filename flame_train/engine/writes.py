"""What was written in place, and when, so that a node of a graph notices that what it keeps has changed since.

An op that runs notes nothing: writes are the rare case, and only nodes older than the last one look among them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

from .backend import extent, owner
from .dtype import Array

SEQUENCE = itertools.count()
"""The order in which nodes are made and memory is written."""

_MANY = 64  # parts of one memory that are told apart

Part = tuple[int, int]


class Writes:
    """The memory that is still there and was written: by owner, when each part of it was last."""

    def __init__(self) -> None:
        self.last = -1
        self._parts: dict[int, dict[Part, int]] = {}
        self._owners: dict[int, weakref.ref[Array]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, array: Array) -> None:
        """`array` is written now."""
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
