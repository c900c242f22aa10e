"""Small JSON files that say nothing rather than something wrong: a checksum stands before the text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from flame_train.disk.atomic_write import write_atomically

_LARGEST: Final = 200 << 20


def read_checked(path: Path) -> Any:
    """What `write_checked` wrote; None if there is nothing, or anything else."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        digest, _, body = path.read_bytes().partition(b"\n")
        return json.loads(body) if digest == hashlib.sha256(body).hexdigest().encode() else None
    except (OSError, ValueError, RecursionError):
        return None


def write_checked(path: Path, content: Any) -> None:
    """Writes what JSON can hold, whole or not at all. Raises OutputError where the disk cannot take it."""
    body = json.dumps(content, separators=(",", ":")).encode()
    parts = [hashlib.sha256(body).hexdigest().encode(), b"\n", body]
    write_atomically(path, parts, sum(map(len, parts)))
