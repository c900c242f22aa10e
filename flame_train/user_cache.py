"""Where this program keeps what it found out for a user: below XDG_CACHE_HOME or ~/.cache."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path | None:
    """The folder `flame-train/NAME` there, whether it exists or not; None if the user has no home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a container's user without HOME or an entry in the system's table of users
        return None
    return base / "flame-train" / name
