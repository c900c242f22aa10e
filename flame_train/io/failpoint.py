"""Named places where a test can make the process die, the disk fill or a number go bad. For tests only.

`FLAME_TEST_FAILPOINT=name[:nth][:action],...` arms places: at its nth hit (default 1, or `all`) each does `kill`
(SIGKILL, the default), `term`, `int`, `hup` or `usr1` (that signal), `enospc` (raises OSError: no space left) or, where
`spoil` stands, `nan`. Without the variable nothing happens.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import Any

VARIABLE = "FLAME_TEST_FAILPOINT"

_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "usr1": signal.SIGUSR1,
}
_hits: Counter[str] = Counter()  # by the variable's whole value and the place; filled only while it is set


def hit(name: str) -> None:
    """Do what the environment asks for at the place called `name`; usually nothing."""
    action = _due(name)
    if action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    if action is not None:
        os.kill(os.getpid(), _SIGNALS[action])


def spoil(name: str, array: Any) -> None:
    """Write NaN into the first entry of `array`, if the environment asks for it."""
    if _due(name) == "nan":
        array[(0,) * array.ndim] = float("nan")


def _due(name: str) -> str | None:
    """The action that is asked for at this hit of `name`."""
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return None
    for point in armed.split(","):
        wanted, *details = point.split(":")
        if wanted == name:
            return _counted(f"{armed} {point}", details)
    return None


def _counted(key: str, details: list[str]) -> str | None:
    nth, action = "1", "kill"
    for part in details:
        if part == "all" or part.isdigit():
            nth = part
        else:
            action = part
    _hits[key] += 1
    return action if nth in ("all", str(_hits[key])) else None
