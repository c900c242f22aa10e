"""Sets of images: the tables `[[data.sets]]`, each with settings of its own in place of those of `[data]`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flame_train.settings import Section, field


class DataSet(Section):
    """One `[[data.sets]]`: a folder, and what its images have instead of the keys of `[data]`."""

    path: str = field("", "the folder of images with captions; required", place=True)
    repeats: int | None = field(None, "how often each image comes in one epoch", ge=1)
    weight: float = field(
        1.0,
        "factor on how often its images come: 0.5 shows half of them in an epoch; 0 leaves the set out",
        ge=0,
        le=1000,
    )
    validation: bool = field(False, "its images are never trained on")


@dataclass(frozen=True, slots=True)
class ImageSet:
    """A set with its settings decided. `path` is the folder; the others are the keys of `DataSet`."""

    path: Path
    repeats: int
    weight: float = 1.0
    validation: bool = False


def image_sets(data: Any) -> tuple[ImageSet, ...]:
    """The sets of a `[data]` section, whose keys hold where a set has none of its own; without sets, its folder."""
    given = data.sets or (DataSet(path=data.path),)
    return tuple(ImageSet(**{part.name: _decided(one, data, part.name) for part in fields(ImageSet)}) for one in given)


def _decided(own: DataSet, data: Any, name: str) -> Any:
    value = getattr(own, name)
    if value is None:
        value = getattr(data, name)
    return Path(value) if name == "path" else value
