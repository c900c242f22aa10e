"""Room for large workspaces, one for all of them: work is on one stream, and each is done with it before the next.

A deterministic attention's gradients work in gigabytes. Taken and given back among all else that comes and goes in a
step, such a block leaves a gap that smaller arrays settle in, and the next one must be found beside it: steps took that
much more than was ever used at once. So it is kept; and for a graph it is taken before all else.
"""

from __future__ import annotations

from typing import Any

from ...mode import mode

_LARGE = 512 << 20  # bytes; smaller ones find a gap


class Scratch:
    """The room, as large as the largest workspace so far."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.room: Any = None  # where work is done now
        self._most = 0
        self._known: list[Any] = []  # rooms where captured graphs work

    def of(self, size: int) -> Any:
        """An array of at least `size` bytes, for work that is queued before the next is asked for."""
        if size < _LARGE:
            return self._cupy.empty(max(1, size), "uint8")
        self._most = max(self._most, size)
        return self.settle()

    def settle(self) -> Any:
        """The room for all that was asked for so far, if there was such; in a capture it is that graph's to keep."""
        if self.room is None or self.room.nbytes < self._most:
            self.room = None  # given back first
            self.room = self._cupy.empty(self._most, "uint8") if self._most else None
        if mode().capturing and self.room is not None and not any(r is self.room for r in self._known):
            self._known.append(self.room)
        return self.room

    def release(self) -> None:
        """Gives all of it back. No graph may live."""
        self.room = None
        self._known.clear()
