"""Which of several windows acts: the first that asks, until another takes over or it was not seen for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from flame_train.errors import OutputError

_KEPT_S: Final = 90.0  # a browser asks once a minute for a page in the background


class OtherWindow(OutputError):
    """Another window acts."""


class Lease:
    """The window that acts, by the name that its page made up. A server that starts again knows none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._one = clock, threading.Lock()
        self._holder: str | None = None
        self._seen = 0.0

    def holds(self, window: str, take: bool = False) -> bool:
        """Tells whether a window acts: it does already, nobody does, or it takes over."""
        with self._one:
            now = self._clock()
            if take or self._holder is None or now - self._seen > _KEPT_S:
                self._holder = window
            if self._holder != window:
                return False
            self._seen = now
            return True

    def check(self, window: str) -> None:
        """Raises OtherWindow unless this window acts."""
        if not self.holds(window):
            raise OtherWindow("another window acts, and this one looks; take over in this one first")
