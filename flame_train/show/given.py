"""Values of a JSON or TOML file that anybody may have written: of the type that is expected, or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def tree_of_json(raw: bytes) -> Any:
    """What a JSON file holds; None if it makes no sense."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def table(value: Any) -> Mapping[str, Any]:
    """A table; an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def rows(value: Any) -> list[Mapping[str, Any]]:
    """The tables of a list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number; truth values are none."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """A whole number that is not negative; truth values are none."""
    return value if type(value) is int and value >= 0 else None
