"""Host memory: what this process has in use, what Python allocates, and what the machine or a control group leaves."""

from __future__ import annotations

import contextlib
import importlib
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import psutil


class Allocations:
    """Watches the process's allocations, in blocks that may lie in one another.

    What was allocated before tracing began and is freed inside is not subtracted. A peak that other code had
    tracemalloc note is lost.
    """

    def __init__(self) -> None:
        self._open = 0
        self._most = 0  # of blocks that have ended inside those that are open
        self._started = False

    def watch(self) -> Callable[[], int]:
        """Begins a block. The result ends it, and says how many bytes more than at its beginning were taken at once."""
        if self._open == 0:
            self._started = not tracemalloc.is_tracing()
            if self._started:
                tracemalloc.start()
        before, peak = tracemalloc.get_traced_memory()
        outer = max(self._most, peak)
        self._open, self._most = self._open + 1, 0
        tracemalloc.reset_peak()

        def end() -> int:
            most = max(self._most, tracemalloc.get_traced_memory()[1])
            self._open, self._most = self._open - 1, max(outer, most)
            if self._open == 0:
                self._most = 0
                if self._started:
                    tracemalloc.stop()
            return most - before

        return end


_GROUP = Path("/sys/fs/cgroup")  # of version 2, as a container sees its own


def available(group: Path = _GROUP) -> int:
    """Bytes that can be taken without swapping."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((group / "memory.max").read_text())
        taken = int((group / "memory.current").read_text())
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = next(int(row[1]) for row in rows if row[0] == "inactive_file")  # given back when memory is wanted
    except (OSError, ValueError, StopIteration):  # no such group, or "max": it sets no limit
        return free
    return min(free, max(limit - taken + cached, 0))


_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"

_CLEAR_MARK = "5"  # written to clear_refs it resets the mark, see proc(5)

_SLACK = 1 << 20  # bytes by which Linux's figures, which it gathers thread by thread, may be off


def resident() -> int:
    """Bytes of resident memory now."""
    return int(psutil.Process().memory_info().rss)


def high_water() -> int | None:
    """Returns the peak in bytes, on Linux since it was last reset; None where the system counts none."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", Path(_STATUS).read_text(), re.MULTILINE)
    except OSError:
        found = None
    return 1024 * int(found[1]) if found else _of_life()


def _of_life() -> int | None:
    """Returns the peak over the process's life, from a call that macOS has as well as Linux."""
    try:
        resource = importlib.import_module("resource")  # by its name: mypy knows nothing in it on Windows
    except ImportError:  # Windows
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if psutil.MACOS else 1024)


class Peak:
    """The peak of resident memory since the last reset.

    The mark cannot be reset on macOS, or where /proc is read-only or sandboxed. Then the peak is unknown until the mark
    rises above its value at the reset. That may be that of an earlier peak.
    """

    def __init__(self) -> None:
        self._stood = 0

    def reset(self) -> None:
        """Starts over from the memory in use now."""
        now = resident()
        with contextlib.suppress(OSError):  # the mark, read below, shows whether it worked
            Path(_CLEAR).write_text(_CLEAR_MARK)
        mark = high_water() or 0
        self._stood = mark if mark > now + _SLACK else 0

    def read(self) -> int | None:
        """Returns the peak in bytes, or None if it is unknown."""
        mark = high_water()
        return mark if mark is not None and mark > self._stood else None
