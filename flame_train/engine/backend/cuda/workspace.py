"""One buffer shared by all large workspaces: work is on one stream, and each is done with it before the next.

The gradients of deterministic attention need a workspace of gigabytes. Allocated and freed in the middle of a step,
such a block leaves a hole that smaller arrays settle in. So the next one does not fit there any more. Steps took
that much more memory than was ever in use at once. So the buffer is kept, and a graph allocates it before all else.
"""

from __future__ import annotations

from typing import Any

from ...mode import mode

_LARGE = 512 << 20  # bytes; smaller workspaces do no harm and are allocated each time, where there is no buffer yet


class Workspace:
    """The shared buffer, as large as the largest workspace so far."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.buffer: Any = None  # the buffer in use
        self._most = 0
        self._known: list[Any] = []  # buffers that captured graphs write to, kept alive for them

    def get(self, size: int) -> Any:
        """An array of at least `size` bytes, valid for work that is queued before the next call."""
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
