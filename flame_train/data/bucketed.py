"""A dataset with each image's bucket and crop, and the report about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flame_train.data.buckets import BucketRule, Placement, Size, placed_beside, width_by_height
from flame_train.data.dataset import Dataset, DatasetError, Item, OnBad
from flame_train.errors import DataError, shown

if TYPE_CHECKING:
    from rich.table import Table

WELL_KEPT = 0.8  # a image that keeps less of its area is worth a notice


@dataclass(frozen=True, slots=True)
class BucketedDataset:
    """`placements[i]` belongs to `dataset.items[i]`, and `controls[i]` to its control images."""

    dataset: Dataset
    placements: tuple[Placement, ...]
    controls: tuple[tuple[Placement, ...], ...] = ()

    def __iter__(self) -> Iterator[tuple[Item, Placement]]:
        return zip(self.dataset.items, self.placements, strict=True)

    @property
    def buckets(self) -> tuple[Size, ...]:
        """Each item's bucket, (height, width), from which the order of samples follows."""
        return tuple(placement.bucket for placement in self.placements)

    def to_json(self) -> list[dict[str, Any]]:
        """One object an image; sizes as "WIDTHxHEIGHT", scale and kept rounded to four places."""
        return [{"file": shown(item.key), **p.to_json()} for item, p in self]

    def bucket_table(self) -> Table:
        """`bucket_rows`, to be printed."""
        table = _table("bucket", "images", "scale", "cropped at most")
        for row in bucket_rows(self.placements):
            table.add_row(*map(str, row.values()))
        return table

    def image_table(self) -> Table:
        """A line for each image: its size, bucket, scale and crop by side."""
        table = _table("image", "size", "bucket", "scale", "cropped")
        for item, p in self:
            row = shown(item.key), width_by_height(p.original), width_by_height(p.bucket), f"{p.scale:.2f}", _cropped(p)
            table.add_row(*row)
        return table


def bucket_rows(placements: Sequence[Placement]) -> list[dict[str, Any]]:
    """A row a bucket: its size, how many images, how they were scaled, the largest share cropped away."""
    inside: dict[Size, list[Placement]] = {}
    for placement in placements:
        inside.setdefault(placement.bucket, []).append(placement)
    return [
        {
            "bucket": width_by_height(bucket),
            "images": len(those),
            "scale": f"{min(p.scale for p in those):.2f} to {max(p.scale for p in those):.2f}",
            "cropped at most": f"{1 - min(p.kept for p in those):.0%}",
        }
        for bucket, those in sorted(inside.items())
    ]


def assign_buckets(dataset: Dataset, rule: BucketRule, on_bad: OnBad = "error") -> BucketedDataset:
    """Give every image its bucket.

    Images too small for any bucket raise a DatasetError that lists them all. With on_bad "skip" they are left out
    with a notice (DatasetError if none is left).
    """
    kept: list[Item] = []
    placements: list[Placement] = []
    controls: list[tuple[Placement, ...]] = []
    problems: list[str] = []
    known: dict[Size, Placement] = {}  # large datasets have few sizes
    for item in dataset.items:
        try:
            if item.size not in known:
                known[item.size] = rule.assign(item.size)
            controls.append(_beside(item, known[item.size], rule))
            placements.append(known[item.size])
            kept.append(item)
        except DataError as error:
            problems.append(f"{shown(item.key)}: {error}")
    if problems and (on_bad == "error" or not kept):
        raise DatasetError(dataset.root, problems)
    notices = [*dataset.notices, *(f"left out: {problem}" for problem in problems)]
    cropped = [item.key for item, p in zip(kept, placements, strict=True) if p.kept < WELL_KEPT]
    if cropped:
        notices.append(
            f"{len(cropped)} image(s) lose over {1 - WELL_KEPT:.0%} to the crop, e.g. {shown(cropped[0])}: "
            "dataset.json in the run folder has them all; a smaller data.bucket_step crops less"
        )
    return BucketedDataset(
        replace(dataset, items=tuple(kept), notices=tuple(notices)), tuple(placements), tuple(controls)
    )


def _beside(item: Item, placement: Placement, rule: BucketRule) -> tuple[Placement, ...]:
    """The placements of an image's control images. Raises DataError that names one for which there is no bucket."""
    found = []
    for control in item.controls:
        try:
            found.append(placed_beside(control.size, placement, rule))
        except DataError as error:
            raise DataError(f"its control image {shown(control.path)}: {error}") from None
    return tuple(found)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _cropped(p: Placement) -> str:
    """Such as "left 3, right 4"; pixels of the resized image."""
    (height, width), (rows, columns) = p.resized, p.bucket
    sides = {
        "top": p.crop_top,
        "bottom": height - rows - p.crop_top,
        "left": p.crop_left,
        "right": width - columns - p.crop_left,
    }
    return ", ".join(f"{side} {pixels}" for side, pixels in sides.items() if pixels) or "-"
