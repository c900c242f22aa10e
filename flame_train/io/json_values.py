"""Values that anybody may have written, in JSON or TOML: of the type that is expected and within bounds, or nothing.

Our own files have a checksum before the text (`write_checked`), and say nothing rather than something wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.disk.atomic_write import write_atomically

DEPTH: Final = 16
"""Lists and tables in one another."""
PARTS: Final = 8
"""Parts of a TOML key with dots."""
_LARGEST: Final = 1e100
_WHOLE: Final = 1 << 63
_BITS: Final = 4096  # of an integer
_SCANNED: Final = 1 << 20  # bytes of JSON whose nesting is looked at before it is parsed
_JSON: Final = re.compile(r'"(?:\\.|[^"\\])*(?:"|\Z)|[\[\]{}]', re.DOTALL)
_TOML: Final = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)|'
    + r"'''.*?(?:'''|\Z)|"
    + r'"(?:\\.|[^"\\\n])*"?|'
    + r"'[^'\n]*'?|#[^\n]*|[\[\]{}.=,\n]",
    re.DOTALL,
)


class TooDeep(ValueError):
    """A text whose values are nested deeper than any of ours, which parsers take long for."""


def json_tree(raw: bytes | str) -> Any:
    """Returns what a JSON text holds; None if it makes no sense, or is nested too deep."""
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        if text.count("[") + text.count("{") > DEPTH and len(text) <= _SCANNED:
            _refuse_deep(match.group() for match in _JSON.finditer(text))
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def toml_tree(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML text. Raises ValueError if it is none, TooDeep before it is parsed.

    A parser's time grows with the square of a key's parts.
    """
    _refuse_deep(match.group() for match in _TOML.finditer(text))
    tree = tomllib.loads(text)
    _refuse_huge(tree)
    return tree


def _refuse_huge(tree: dict[str, Any]) -> None:
    """Raises ValueError for an integer that Python would not write out, which it only refuses to read as decimals."""
    pending: list[Any] = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, int) and value.bit_length() > _BITS:
            raise ValueError("an integer of too many digits")


def _refuse_deep(tokens: Any) -> None:
    depth = dots = 0
    for token in tokens:
        if token in "[{":
            depth, dots = depth + 1, 0
        elif token in "]}":
            depth = max(depth - 1, 0)
        elif token == ".":
            dots += 1
        elif token in "=,\n":
            dots = 0
        if depth > DEPTH or dots >= PARTS:
            raise TooDeep(f"expected at most {DEPTH} levels of lists and tables, and {PARTS} parts of a key")


def table(value: Any) -> Mapping[str, Any]:
    """Returns a table; an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def rows(value: Any) -> list[Mapping[str, Any]]:
    """Returns the tables of a list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """Returns a number of which sums and squares are finite; truth values are none."""
    return float(value) if type(value) in (int, float) and -_LARGEST <= value <= _LARGEST else None


def whole(value: Any) -> int | None:
    """Returns a whole number of 63 bits that is not negative; truth values are none."""
    return value if type(value) is int and 0 <= value < _WHOLE else None


def text(value: Any, otherwise: str = "") -> str:
    """Takes a text that can be written anywhere, without lone surrogates; `otherwise` in place of anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else otherwise


_LARGEST_CHECKED: Final = 200 << 20


def read_checked(path: Path) -> Any:
    """Returns what `write_checked` wrote; None if there is nothing, or anything else."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_CHECKED:
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
