"""The lists of published names in `tests/golden/keys`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

_KEYS = Path(__file__).parent / "golden" / "keys"


def golden(name: str) -> dict[str, Any]:
    """A list as its file has it; the README beside it says what that is."""
    with gzip.open(_KEYS / f"{name}.json.gz") as stream:
        lines: dict[str, Any] = json.load(stream)
    return lines
