"""The samples of a run: each image of each set, in its buckets, what text encoders read of them, which are held out.

The order is that of the sets, then of their images.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from flame_train.data.bucketed import BucketedDataset, bucket_rows
from flame_train.data.buckets import Placement, Size
from flame_train.data.companion_files import Control
from flame_train.data.dataset import DatasetError, Item
from flame_train.data.order import BatchSchedule
from flame_train.data.sets import DataSet
from flame_train.data.views import View, ViewedImage
from flame_train.errors import ConfigError, DataError, counted, shown

_LISTED = 10
_FEW = 1000  # different images; of fewer the hash alone would hold out another share than was asked for


def split(samples: Samples, fraction: float, before: Collection[str] = ()) -> tuple[Samples, Samples]:
    """Returns what is trained on, and what is held out: the validation sets, and `fraction` of the other images.

    Copies of an image share a side. Of 1000 images and more a side follows from the image's bytes alone, so it stays
    when others come or go. Of fewer those of the lowest hashes are held out, as many as were asked for, at least one.

    Args:
        fraction: the share.
        before: the SHA-256 of images that this run held out when it began; they stay held out, and no others.

    Raises:
        ConfigError: no image is left to train on.
        DataError: a validation set has images that are trained on.
    """
    rest, held = samples.where(lambda row: not row.set.validation), samples.where(lambda row: row.set.validation)
    if not rest.rows:
        raise ConfigError("data.sets: expected a set to train on, got validation = true in all; add one without")
    refuse_common([row.item for row in rest.rows], [row.item for row in held.rows])
    if not fraction:
        return rest, held
    hashes = frozenset(before) or _chosen({row.item.sha256 for row in rest.rows}, fraction)
    taken = rest.where(lambda row: row.item.sha256 in hashes)
    training = rest.where(lambda row: row.item.sha256 not in hashes)
    if not training.rows:
        number = len(rest.rows)
        raise ConfigError(
            f"validation.fraction: expected images left to train on, got none of {number}; set validation.fraction = 0"
            if number == 1
            else f"validation.fraction: expected images left to train on, got none of {number}; lower it, or add images"
        )
    return training, held.joined(taken)


def _chosen(hashes: Collection[str], fraction: float) -> frozenset[str]:
    if len(hashes) < _FEW:
        return frozenset(sorted(hashes)[: max(1, round(fraction * len(hashes)))])
    return frozenset(one for one in hashes if int(one[:13], 16) / 16**13 <= fraction)


def refuse_common(rest: Iterable[Item], held: Iterable[Item]) -> None:
    """Raises DataError for images of validation sets that are trained on: their loss would not be of unseen images."""
    seen = {item.sha256: item for item in rest}
    both = [(item, seen[item.sha256]) for item in held if item.sha256 in seen]
    if both:
        lines = [f"  {shown(mine.path)}: is the same image as {shown(other.path)}" for mine, other in both[:_LISTED]]
        more = [f"  ... and {len(both) - _LISTED} more"] if len(both) > _LISTED else []
        are = counted(len(both), "validation image is", "validation images are")
        advice = f"data.sets: {are} also trained on; remove what is twice from one set:"
        raise DataError("\n".join([advice, *lines, *more]))


_ENDLESS: Final = 2**40


@dataclass(frozen=True, slots=True)
class Sample:
    """An image of a set in a bucket.

    Attributes:
        item: the image.
        placement: its bucket, and the crop in the centre.
        set: its set.
        repeats: how often it comes in one epoch, before the set's weight.
        texts: its texts, of which a step sees one.
        controls: the buckets of its control images.
    """

    item: Item
    placement: Placement
    set: DataSet
    repeats: int
    texts: tuple[str, ...]
    controls: tuple[Placement, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of its bucket, then those of its control images' buckets and the frames of a clip.

        Samples of a batch share them.
        """
        height, width, *frames = self.placement.shape
        return height, width, *(side for own in self.controls for side in own.bucket), *frames

    def seen(self, view: int) -> ViewedImage:
        """Returns its image in one of its views."""
        return ViewedImage(self.item.path, self.item.sha256, self.views[view])

    def controls_beside(self, view: int) -> tuple[ViewedImage, ...]:
        """Returns its control images, as they are seen beside one of its views."""
        return tuple(self.control(view, number) for number in range(len(self.controls)))

    def control(self, view: int, number: int) -> ViewedImage:
        """Returns one of its control images, beside one of its views."""
        file = self.item.controls[number]
        return ViewedImage(file.path, file.sha256, self.views[view].along(self.controls[number]))

    @property
    def views(self) -> tuple[View, ...]:
        """Its views, of which a step sees one."""
        return self.set.view_rule.views(self.placement, self.item.sha256)

    def text(self, number: int) -> str:
        """Gives one of `texts`, or for a higher number another text of the same captions, of which there is no end."""
        return self.texts[number] if number < len(self.texts) else self.set.captions.drawn(self.item.captions, number)

    def text_count(self, cached: bool) -> int:
        """Returns how many texts a step chooses among: those that are `cached`, or as many as there are numbers."""
        return len(self.texts) if cached or not self.set.captions.vary else _ENDLESS


@dataclass(frozen=True)
class Samples:
    """The samples of some sets, and what a user should know of them."""

    sets: tuple[DataSet, ...]
    rows: tuple[Sample, ...]
    notices: tuple[str, ...] = ()
    group: int = 1
    """How many rows, one after another, belong together."""

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The bucket and crop of each sample."""
        return tuple(row.placement for row in self.rows)

    @property
    def buckets(self) -> tuple[Size, ...]:
        """The buckets that samples lie in, (height, width), each once."""
        return tuple(sorted({placement.bucket for placement in self.placements}))

    @property
    def encoded(self) -> tuple[Placement, ...]:
        """The placements in which images and clips are encoded, control images among them."""
        return tuple(each for row in self.rows for each in (row.placement, *row.controls))

    @property
    def names(self) -> tuple[str, ...]:
        """What messages and the log call each sample."""
        return tuple(self._name(row) for row in self.rows)

    @cached_property
    def masked(self) -> bool:
        """Whether any image has a mask."""
        return any(row.item.mask is not None for row in self.rows)

    @cached_property
    def weighted(self) -> bool:
        """Whether the loss of any image has a weight."""
        return any(own.loss_weight != 1.0 for own in self.sets)

    def loss_weight_shape(self, latent: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape of weights for latents (..., h, w, Z), the same for all frames.

        All samples have some, or None if none has.
        """
        if not self.masked and not self.weighted:
            return None
        sides = latent[-3:-1] if self.masked else (1, 1)
        return *(1 for _ in latent[:-3]), *sides, 1

    def order(self, seed: int) -> BatchSchedule:
        """Returns which sample comes when."""
        rows = self.rows
        return BatchSchedule(
            [row.shape for row in rows],
            [row.repeats for row in rows],
            [row.set.batch_size for row in rows],
            seed,
            weights=[row.set.weight for row in rows],
            group=self.group,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Returns one object a sample: its place, as `Placement.to_json` has it, its texts, mask and views."""
        return [self._json(row) for row in self.rows]

    def bucket_rows(self) -> list[dict[str, Any]]:
        """Returns a row a bucket; see `bucket_rows`."""
        return bucket_rows(self.placements)

    def where(self, wanted: Callable[[Sample], bool]) -> Samples:
        """Returns those that are `wanted`; sets without one are left out."""
        rows = tuple(row for row in self.rows if wanted(row))
        set_ids = {id(row.set) for row in rows}
        return Samples(tuple(own for own in self.sets if id(own) in set_ids), rows)

    def joined(self, others: Samples) -> Samples:
        """Joins these and the others."""
        sets = {id(own): own for own in (*self.sets, *others.sets)}
        return Samples(tuple(sets.values()), (*self.rows, *others.rows))

    def _name(self, row: Sample) -> str:
        return row.item.key if len(self.sets) == 1 else f"{row.set.folder.name}/{row.item.key}"

    def _json(self, row: Sample) -> dict[str, Any]:
        mask, views = row.item.mask, row.views
        return {
            **({"set": row.set.folder.name} if len(self.sets) > 1 else {}),
            "file": shown(row.item.key),
            **row.placement.to_json(),
            "captions": list(row.texts),
            **(
                {"controls": [_control_json(*each) for each in zip(row.item.controls, row.controls, strict=True)]}
                if row.controls
                else {}
            ),
            **({"mask": "alpha" if mask.alpha else shown(mask.path.name)} if mask else {}),
            **({"views": [view.settings for view in views]} if len(views) > 1 else {}),
        }


def _control_json(control: Control, placement: Placement) -> dict[str, Any]:
    path = control.path
    return {"file": shown(f"{path.parent.name}/{path.name}"), **placement.to_json()}


def samples_of(parts: Sequence[tuple[DataSet, BucketedDataset]]) -> Samples:
    """Returns the samples of sets in their buckets; a set comes once for each of its resolutions.

    An image that an earlier resolution of its set placed in the same way is left out with a notice. Raises DataError
    for all wildcards that are wrong.
    """
    rows: list[Sample] = []
    notices: list[str] = []
    problems: dict[int, tuple[BucketedDataset, list[str]]] = {}
    sets = {id(own): own for own, _ in parts}
    texts: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = {}
    placed_before: set[tuple[int, str, Placement]] = set()
    for own, placed in parts:
        twice = 0
        controls = placed.controls or [()] * len(placed.placements)
        for (item, placement), beside, repeats in zip(placed, controls, placed.dataset.repeats_per_image, strict=True):
            if (id(own), item.key, placement) in placed_before:
                twice += 1
                continue
            placed_before.add((id(own), item.key, placement))
            pool = texts.get((id(own), item.captions))
            try:
                pool = texts[id(own), item.captions] = pool or own.captions.texts(item.captions)
            except DataError as error:
                problems.setdefault(id(own), (placed, []))[1].append(f"{shown(item.key)}: its caption: {error}")
                continue
            rows.append(Sample(item, placement, own, repeats, pool, beside))
        notices += [f"{own.folder.name}: {n}" if len(sets) > 1 else n for n in placed.dataset.notices]
        if twice:
            notices.append(
                f"{counted(twice, 'image')} of {shown(own.folder.name)}: left out of a resolution that is too high"
            )
    if problems:
        raise DataError("\n".join(str(DatasetError(p.dataset.root, lines)) for p, lines in problems.values()))
    return Samples(tuple(sets.values()), tuple(rows), tuple(dict.fromkeys(notices)))


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """A caption or prompt, and the control images that stand before it; none for an encoder of texts alone."""

    text: str
    images: tuple[ViewedImage, ...] = ()


def encoder_inputs(row: Sample, texts: Iterable[str], with_images: bool) -> Iterator[EncoderInput]:
    """Yields what is read of texts of a sample: each once, or where encoders look at images, once a view of these."""
    seen = [row.controls_beside(view) for view in range(len(row.views))] if with_images and row.controls else [()]
    return (EncoderInput(text, images) for text in texts for images in seen)
