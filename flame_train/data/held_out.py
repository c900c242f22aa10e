"""Images that are held out of training, for validation: whole sets, or a share of the images by the hash of each."""

from __future__ import annotations

from collections.abc import Iterable

from flame_train.data.dataset import Item
from flame_train.data.samples import Samples
from flame_train.errors import ConfigError, DataError, shown

_LISTED = 10


def split(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    """What is trained on, and what is held out: the validation sets, and `fraction` of the other images.

    An image's side follows from its bytes alone. So it stays there when others come or go, and copies of it share it.
    Of few images the one of the lowest hash is held out in any case.

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
    edge = max(fraction, min(_place(row.item) for row in rest.rows))

    taken = rest.where(lambda row: _place(row.item) <= edge)
    left = rest.where(lambda row: _place(row.item) > edge)
    if not left.rows:
        raise ConfigError(
            f"validation.fraction: expected images left to train on, got none of {len(rest.rows)}; lower it, or add "
            "images"
        )
    return left, held.joined(taken)


def _place(item: Item) -> float:
    """Where an image's hash lies between 0 and 1."""
    return int(item.sha256[:13], 16) / 16**13


def refuse_common(rest: Iterable[Item], held: Iterable[Item]) -> None:
    """Raises DataError for images of validation sets that are trained on: their loss would not be of unseen images."""
    seen = {item.sha256: item for item in rest}
    both = [(item, seen[item.sha256]) for item in held if item.sha256 in seen]
    if both:
        lines = [f"  {shown(mine.path)}: is the same image as {shown(other.path)}" for mine, other in both[:_LISTED]]
        more = [f"  ... and {len(both) - _LISTED} more"] if len(both) > _LISTED else []
        told = f"data.sets: {len(both)} validation image(s) are also trained on; remove them from one set:"
        raise DataError("\n".join([told, *lines, *more]))
