"""Stop requests: SIGINT, SIGTERM, SIGHUP and SIGUSR1 take effect at the next place where no work is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from flame_train.errors import STOPPING, Interrupted


class StopRequest:
    """While entered, the first signal sets `signal_number` and is said to be heard; a second one ends the process.

    Work in many small parts (caching, sampling) calls `check()` between them. The training loop reads `requested` at
    the end of a step, saves, and then calls `check()`. A signal that is ignored from outside, as `nohup` does with
    SIGHUP and a shell with a background job's SIGINT, stays ignored.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal_number != 0

    def check(self, where: str) -> None:
        """Raises `Interrupted` if a signal came. `where` ends the sentence "stopped ..."."""
        if self.requested:
            raise Interrupted(self.signal_number, f"stopped {where}")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            heard = [s for s in STOPPING if signal.getsignal(s) is not signal.SIG_IGN]
            self._previous = {s: signal.signal(s, self._note) for s in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            _say("stopped at once: unsaved work is lost")
            os._exit(128 + number)
        self.signal_number = number
        name = signal.Signals(number).name  # it is said, for a step or a download may take minutes
        _say(f"{name}: stopping as soon as no work is lost; a second signal stops at once")


def _say(text: str) -> None:
    """A line on standard error, past Python's buffers, which a handler may find in use."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
