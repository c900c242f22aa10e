"""Being asked to stop: SIGINT and SIGTERM are noted, and acted on where nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from flame_train.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first signal only sets `signal_number`; a second one ends the process at once.

    Work in many small parts (caching, sampling) calls `check()` between them; the training loop looks at
    `requested` at the end of a step, saves, and then calls `check()`.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal_number != 0

    def check(self, what: str = "stopped") -> None:
        """Raises `Interrupted` if a signal came."""
        if self.requested:
            raise Interrupted(self.signal_number, f"{what} by {signal.Signals(self.signal_number).name}")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._previous = {s: signal.signal(s, self._note) for s in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.signal_number = number
