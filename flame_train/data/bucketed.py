"""A dataset with each image's bucket and crop, and the report about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flame_train.data.buckets import BucketRule, Placement, Size, placed_beside, width_by_height
from flame_train.data.clips import ClipRule
from flame_train.data.dataset import Dataset, DatasetError, Item, OnBad
from flame_train.data.problems import grouped
from flame_train.errors import DataError, counted, shown

WELL_KEPT = 0.8  # a image that keeps less of its area is worth a notice


@dataclass(frozen=True, slots=True)
class BucketedDataset:
    """`placements[i]` belongs to `dataset.items[i]`, and `controls[i]` to its control images."""

    dataset: Dataset
    placements: tuple[Placement, ...]
    controls: tuple[tuple[Placement, ...], ...] = ()

    def __iter__(self) -> Iterator[tuple[Item, Placement]]:
        return zip(self.dataset.items, self.placements, strict=True)


def bucket_rows(placements: Sequence[Placement]) -> list[dict[str, Any]]:
    """Returns a row a bucket: its size, how many images, how they were scaled, the largest share cropped away."""
    inside: dict[tuple[int, ...], list[Placement]] = {}
    for placement in placements:
        inside.setdefault(placement.shape, []).append(placement)
    return [
        {
            "bucket": width_by_height((height, width)),
            **({"frames": frames[0]} if frames else {}),
            "images": len(those),
            "scale_least": round(min(p.scale for p in those), 4),
            "scale_most": round(max(p.scale for p in those), 4),
            "cropped_most": round(1 - min(p.kept for p in those), 4),
        }
        for (height, width, *frames), those in sorted(inside.items())
    ]


def assign_buckets(
    dataset: Dataset, rule: BucketRule, on_bad: OnBad = "error", clips: ClipRule | None = None
) -> BucketedDataset:
    """Give every image its bucket, and every clip one for each of its parts that `clips` takes.

    Images too small for any bucket raise a DatasetError that lists them all. With on_bad "skip" they are left out
    with a notice (DatasetError if none is left).
    """
    readable: list[Item] = []
    placements: list[Placement] = []
    controls: list[tuple[Placement, ...]] = []
    problems: list[str] = []
    known: dict[Size, Placement] = {}  # large datasets have few sizes
    for item in dataset.items:
        try:
            if item.size not in known:
                known[item.size] = rule.assign(item.size)
            placed = parts_of(item, known[item.size], clips)
            beside = _beside(item, known[item.size], rule)
            controls += [beside] * len(placed)
            placements += placed
            readable += [item] * len(placed)
        except DataError as error:
            problems.append(f"{shown(item.key)}: {error}")
    if problems and (on_bad == "error" or not readable):
        raise DatasetError(dataset.root, problems)
    notices = [*dataset.notices, *(f"left out: {problem}" for problem in grouped(problems))]
    cropped = [item.key for item, p in zip(readable, placements, strict=True) if p.kept < WELL_KEPT]
    if cropped:
        notices.append(
            f"{counted(len(cropped), 'image loses', 'images lose')} over {1 - WELL_KEPT:.0%} to the crop, e.g. "
            f"{shown(cropped[0])}: a higher data.resolution crops less, or a smaller data.bucket_step where the model "
            "takes one; `flame-train dataset` shows them all"
        )
    return BucketedDataset(
        replace(dataset, items=tuple(readable), notices=tuple(notices)), tuple(placements), tuple(controls)
    )


def parts_of(item: Item, placement: Placement, clips: ClipRule | None) -> list[Placement]:
    """Returns an image's placement, or one for each part of a clip. Raises DataError for a clip that is too short."""
    if item.seconds is None or clips is None:
        return [placement]
    return [replace(placement, span=span) for span in clips.spans(item.seconds)]


def _beside(item: Item, placement: Placement, rule: BucketRule) -> tuple[Placement, ...]:
    """Returns the placements of an image's control images. Raises DataError that names one without a bucket."""
    placements = []
    for control in item.controls:
        try:
            placements.append(placed_beside(control.size, placement, rule))
        except DataError as error:
            raise DataError(f"its control image {shown(control.path)}: {error}") from None
    return tuple(placements)
