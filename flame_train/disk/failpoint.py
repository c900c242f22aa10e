"""Failpoints: named places where a test can make the process die, the disk fill or a number go bad. For tests only.

`arm("name[:nth][:action],...")` arms failpoints in this process. Each acts when it is reached the nth time (default 1),
or each time (`all`). Nothing in the package calls `arm`, and no environment variable is read. The actions:

- `kill` (the default), `term`, `int`, `hup` and `usr1` send SIGKILL or that signal to the process.
- `enospc` raises OSError: no space left.
- `nan` puts NaN into the values, where `inject_nan` stands.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from typing import Any, Final

_POSIX: Final = {"hup": "SIGHUP", "usr1": "SIGUSR1"}
_SIGNALS: Final = {
    "kill": getattr(signal, "SIGKILL", signal.SIGTERM),  # os.kill ends a process of Windows at once by either
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    **{action: getattr(signal, name) for action, name in _POSIX.items() if hasattr(signal, name)},
}


@dataclass(slots=True)
class _Point:
    """One armed failpoint: acts when it is reached the `nth` time, or each time (0)."""

    name: str
    nth: int = 1
    action: str = "kill"
    reached: int = 0


_armed: list[_Point] = []


def arm(points: str) -> None:
    """Arms these failpoints and no others; an empty text arms none. Raises ValueError for an unknown action."""
    _armed[:] = [_parsed(point) for point in points.split(",") if points]


def fail_point(name: str) -> None:
    """Runs the action that is armed for the place `name`; usually none."""
    action = _due(name)
    if action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])


def inject_nan(name: str, array: Any) -> None:
    """Writes NaN into the first entry of `array`, if that was armed."""
    if _due(name) == "nan":
        array[(0,) * array.ndim] = float("nan")


def _parsed(text: str) -> _Point:
    name, *details = text.split(":")
    point = _Point(name)
    for part in details:
        if part == "all" or part.isdecimal():
            point.nth = 0 if part == "all" else int(part)
        elif part in (*_SIGNALS, "enospc", "nan"):
            point.action = part
        else:
            raise ValueError(f"a failpoint is name[:nth][:action], got {text!r}")
    return point


def _due(name: str) -> str:
    """Finds the action that is armed for `name` this time; "" if none is."""
    for point in _armed:
        if point.name == name:
            point.reached += 1
            return point.action if point.nth in (0, point.reached) else ""
    return ""
