"""How much memory the host has left for this process: the machine's, or what its control group allows."""

from __future__ import annotations

from pathlib import Path

import psutil

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
