"""The samples of a run: each image of each set, in its bucket. The order is that of the sets, then of their images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flame_train.data.buckets import Placement, Size
from flame_train.data.dataset import Dataset, Item
from flame_train.data.order import Order
from flame_train.data.placed import Placed, bucket_rows
from flame_train.data.sets import ImageSet


@dataclass(frozen=True, slots=True)
class Sample:
    """An image of a set in its bucket. `comings` is how often it comes in one epoch, before the set's weight."""

    item: Item
    placement: Placement
    set: ImageSet
    comings: int


@dataclass(frozen=True)
class Samples:
    """The images of all sets in their buckets: each part is one set's."""

    parts: tuple[tuple[ImageSet, Placed], ...]

    @cached_property
    def rows(self) -> tuple[Sample, ...]:
        """The samples in order."""
        return tuple(
            Sample(item, placement, own, comings)
            for own, placed in self.parts
            for (item, placement), comings in zip(placed, placed.dataset.comings, strict=True)
        )

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """Of each set, its images and captions."""
        return tuple(placed.dataset for _, placed in self.parts)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The bucket and crop of each sample."""
        return tuple(row.placement for row in self.rows)

    @property
    def buckets(self) -> tuple[Size, ...]:
        """The buckets that samples lie in, (height, width), each once."""
        return tuple(sorted({row.placement.bucket for row in self.rows}))

    @property
    def names(self) -> tuple[str, ...]:
        """What messages and the log call each sample."""
        return tuple(self._name(row) for row in self.rows)

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of the sets, each line with its folder where there are several."""
        several = len(self.parts) > 1
        return tuple(
            f"{own.path.name}: {notice}" if several else notice
            for own, placed in self.parts
            for notice in placed.dataset.notices
        )

    def order(self, batch_size: int, seed: int) -> Order:
        """Which sample comes when."""
        rows = self.rows
        return Order(
            [row.placement.bucket for row in rows],
            [row.comings for row in rows],
            batch_size,
            seed,
            weights=[row.set.weight for row in rows],
        )

    def to_json(self) -> list[dict[str, Any]]:
        """One object a sample, as `Placed.to_json` has it; where there are several sets, with its set's folder."""
        several = len(self.parts) > 1
        return [
            ({"set": own.path.name} if several else {}) | row for own, placed in self.parts for row in placed.to_json()
        ]

    def bucket_rows(self) -> list[dict[str, Any]]:
        """A row a bucket; see `bucket_rows`."""
        return bucket_rows(self.placements)

    def _name(self, row: Sample) -> str:
        return row.item.key if len(self.parts) == 1 else f"{row.set.path.name}/{row.item.key}"


def trained(samples: Samples) -> Samples:
    """Those that a run trains on: images of validation sets never are."""
    return Samples(tuple((own, placed) for own, placed in samples.parts if not own.validation))
