"""What a run folder's `dataset.json` says of its images: which of them are others now, and which were held out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flame_train.data.samples import Samples
from flame_train.errors import shown

REPORT: Final = "dataset.json"
_NAMED: Final = 5
_UNREADABLE: Final = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def changed(report: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """What differs, by name: at most five images each that are gone, new, or have another content, crop or caption.

    Args:
        report: `dataset.json` of the run folder, as the run has written it.
        rows: the same for the dataset as it is now.

    Returns:
        Such as "5.png is not there, 6.png is new"; empty where the report cannot be read or lists the same.
    """
    try:
        written = json.loads(report.read_bytes())
        before = _by_name(written)
    except _UNREADABLE:
        return ""
    now = _by_name(rows)
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    captions = [name for name in now if name in before and _captions(before[name]) != _captions(now[name])]
    others = [name for name in now if name in before and name not in captions and before[name] != now[name]]
    parts = (_said(gone, "not there"), _said(new, "new"), _said(captions, "with another caption"))
    return ", ".join(filter(None, (*parts, _said(others, "changed"))))


def held_out_before(folder: Path, fraction: float, samples: Samples) -> frozenset[str]:
    """The SHA-256 of the images that the run in a folder holds out; none where it has others, or another fraction.

    So a run that an earlier version began, which chose them in another way, continues with the same ones.
    """
    try:
        before = _by_name(json.loads((folder / REPORT).read_bytes()))
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        same = config["validation"]["fraction"] == fraction
    except _UNREADABLE:
        return frozenset()
    hashes = {
        next(iter(_by_name([row]))): own.item.sha256 for row, own in zip(samples.to_json(), samples.rows, strict=True)
    }
    if not same or before.keys() != hashes.keys():
        return frozenset()
    return frozenset(hashes[name] for name, rows in before.items() if any(row.get("validation") for row in rows))


def _by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each image; it has one for each resolution."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = f"{row['set']}/{row['file']}" if "set" in row else str(row["file"])
        found.setdefault(name, []).append(row)
    return found


def _captions(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [row["captions"] for row in rows]


def _said(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    one = len(names) == 1
    return f"{', '.join(map(shown, names[:_NAMED]))}{more} {'is' if one else 'are'} {what}"
