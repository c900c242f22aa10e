"""How much memory this process has, and the most that it had: by the system's own mark, which misses no moment."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil

_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
_CLEAR_MARK = "5"  # of clear_refs, proc(5): the mark begins anew
_SLACK = 1 << 20  # Linux counts pages a thread at a time


def resident() -> int:
    """Bytes of resident memory now."""
    return int(psutil.Process().memory_info().rss)


def high_water() -> int | None:
    """The most there ever was, or since Linux was last asked to begin anew; None where no one counts it."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", Path(_STATUS).read_text(), re.MULTILINE)
    except OSError:
        found = None
    return 1024 * int(found[1]) if found else _of_life()


def _of_life() -> int | None:
    """The most there ever was, by what other systems than Linux have too."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if psutil.MACOS else 1024)


class Peak:
    """The most resident memory since the last reset.

    Where the mark cannot be reset (macOS, a /proc that is read-only or a sandbox's) there is no figure until it rises
    above where it stood: what was before might have been higher.
    """

    def __init__(self) -> None:
        self._stood = 0

    def reset(self) -> None:
        """Begins anew."""
        now = resident()
        with contextlib.suppress(OSError):  # where the mark then stands tells
            Path(_CLEAR).write_text(_CLEAR_MARK)
        mark = high_water() or 0
        self._stood = mark if mark > now + _SLACK else 0

    def read(self) -> int | None:
        """Bytes, or None where it cannot be told."""
        mark = high_water()
        return mark if mark is not None and mark > self._stood else None
