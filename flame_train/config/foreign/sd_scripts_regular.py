"""Regularization images: sd-scripts repeats them until an epoch has as many as of training.

The weight of their set here is that factor (train_util.py:2172). It follows from counts, so the folders have to be
there at import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flame_train.data.sniff import IMAGE_ENDINGS

from .conversions import number
from .table import NOTHING, Changed, Lost, Setting, Source

WEIGHT: Final = "(regularization)"
"""The name of the setting that holds the counts of one dataset: images of training, and of regularization."""

_UNCOUNTED: Final = (
    "sd-scripts shows as many of these images as training images in an epoch, and its folders are not here to count; "
    "set the set's weight to training images / regularization images, each times its repeats"
)


def counted(sets: Sequence[dict[str, Setting]], folder: Path | None) -> list[dict[str, Setting]]:
    """The sets of one dataset, those of regularization with the counts, or None where a folder cannot be counted."""
    regular = [bool("is_reg" in one and one["is_reg"].value) for one in sets]
    if not any(regular):
        return list(sets)
    counts = [_count(one, folder) for one in sets]
    kinds = [sum(count for count, is_reg in zip(counts, regular, strict=True) if is_reg == kind) for kind in (0, 1)]
    value = tuple(kinds) if all(counts) and all(kinds) else None
    return [
        one | ({WEIGHT: Setting(value, one["is_reg"].place, one["image_dir"].written or _said(one))} if is_reg else {})
        for one, is_reg in zip(sets, regular, strict=True)
    ]


def weight(value: Any, source: Source) -> Any:
    """How often the set's images come beside their repeats."""
    if value is None:
        return Lost(_UNCOUNTED)
    images, regular = value
    factor = round(images / regular, 6)
    if factor == 1:
        return NOTHING
    return Changed(factor, f"{regular} images come as often as {images} of training, as sd-scripts repeats them")


def _said(one: Mapping[str, Setting]) -> str:
    return f"regularization images in {one['image_dir'].value}" if "image_dir" in one else "regularization images"


def _count(one: Mapping[str, Setting], folder: Path | None) -> int:
    """The images of a set, times their repeats; 0 where its folder is not there or has none."""
    named = str(one["image_dir"].value) if "image_dir" in one else ""
    places = [base / Path(named).expanduser() for base in (folder, Path()) if base is not None and named]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        return 0
    if "N_name" in one:
        repeats = ((own, own.name.partition("_")[0]) for own in place.iterdir() if own.is_dir())
        return sum(int(times) * _images(own) for own, times in repeats if times.isdecimal())
    return int(number(one["num_repeats"].value) if "num_repeats" in one else 1) * _images(place)


def _images(folder: Path) -> int:
    return sum(file.suffix.lower() in IMAGE_ENDINGS for file in folder.iterdir())
