"""Named places where a test can make the process die or the disk fill. For tests only.

`FLAME_TEST_FAILPOINT=name[:nth][:action]` arms one place: at its nth hit (default 1) it does `kill` (SIGKILL,
the default), `term` (SIGTERM), `int` (SIGINT) or `enospc` (raises OSError: no space left). Without the
variable `hit` does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter

VARIABLE = "FLAME_TEST_FAILPOINT"

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
_hits: Counter[str] = Counter()  # by the variable's whole value; filled only while it is set


def hit(name: str) -> None:
    """Do what the environment asks for at the place called `name`; usually nothing."""
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    wanted, _, rest = armed.partition(":")
    if wanted != name:
        return
    nth, action = 1, "kill"
    for part in rest.split(":") if rest else ():
        if part.isdigit():
            nth = int(part)
        else:
            action = part
    _hits[armed] += 1
    if _hits[armed] == nth:
        _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    os.kill(os.getpid(), _SIGNALS[action])
