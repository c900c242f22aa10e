"""Groups of images whose names tell that they belong together, such as NAME.win.png and NAME.lose.png."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flame_train.data.buckets import Placement, width_by_height
from flame_train.data.samples import Sample, Samples
from flame_train.errors import ConfigError, DataError, shown

_LISTED = 10


def grouped(samples: Samples, endings: Sequence[str]) -> Samples:
    """Returns the samples group by group, each in the order of `endings`; the first one's captions are all's.

    Raises DataError for images of no group, lone ones, and groups of several sizes. ConfigError for batches that do not
    take whole groups.
    """
    for own in samples.sets:
        if own.batch_size % len(endings):
            raise ConfigError(
                f"data.batch_size: expected a multiple of {len(endings)}, of {' and '.join(endings)}, got "
                f"{own.batch_size}"
            )
    groups: dict[tuple[int, str, int, int], dict[str, Sample]] = {}
    problems: list[str] = []
    seen = Counter[tuple[Any, ...]]()
    for row in samples.rows:
        stem, _, ending = os.path.splitext(row.item.key)[0].rpartition(".")
        file = id(row.set), row.item.key
        resolution = seen[(*file, row.placement.span)]
        part = seen[(*file, resolution)]  # of a clip at this resolution
        seen.update([(*file, row.placement.span), (*file, resolution)])
        if ending in endings and stem:
            groups.setdefault((id(row.set), stem, resolution, part), {})[ending] = row
        else:
            problems.append(f"{shown(row.item.key)}: expected a name that ends with {_listed(endings)}")
    rows: list[Sample] = []
    for (_, stem, *_), members in groups.items():
        if lacking := [ending for ending in endings if ending not in members]:
            problems.append(f"{shown(stem)}: expected an image {_listed(lacking)} too, got none that can be used")
            continue
        first, *others = (members[ending] for ending in endings)
        if other := next((row for row in others if row.shape != first.shape), None):
            sizes = (_size(row.placement) for row in (first, other))
            problems.append(f"{shown(stem)}: expected images of one size, got buckets of {' and '.join(sizes)}")
            continue
        rows += [first, *(_with_texts(row, first) for row in others)]
    if problems:
        more = [f"... and {len(problems) - _LISTED} more"] * (len(problems) > _LISTED)
        lines = [f"  {line}" for line in (*problems[:_LISTED], *more)]
        raise DataError("\n".join(["data.path: loss.objective wants groups of images:", *lines]))
    return replace(samples, rows=tuple(rows), group=len(endings))


def _with_texts(row: Sample, first: Sample) -> Sample:
    item = replace(row.item, captions=first.item.captions)
    return replace(row, item=item, texts=first.texts, repeats=first.repeats)


def _size(placement: Placement) -> str:
    frames = f" of {placement.frames} frames" if placement.frames > 1 else ""
    return f"{width_by_height(placement.bucket)}{frames}"


def _listed(endings: Sequence[str]) -> str:
    return " or ".join(f".{ending}" for ending in endings)
