"""Images that are held out of training, for validation: whole sets, or a share of the images by their hashes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flame_train.data.dataset import Item
from flame_train.data.samples import Samples
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
