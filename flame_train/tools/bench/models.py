"""The models of `bench step` and `bench memory`: published sizes, random weights, all parts of a step."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flame_train.data.buckets import Placement
from flame_train.errors import ConfigError
from flame_train.models.common.model import Model
from flame_train.models.registry import FAMILIES, NOTHING_NAMED, Family

SIZE_CONDITIONING: Final = 6 * 256
"""The part of the UNet's vector with sizes and crops."""

Arrays = dict[str, np.ndarray[Any, Any]]


def names() -> list[str]:
    """Every model that can be measured. The tiny ones have the published structure and are for a quick look."""
    return [name for family in FAMILIES.values() for name in family.published]


def find(name: str) -> tuple[Family, Model]:
    """The model of that name, its weights declared. Raises `ConfigError` for one that is not known."""
    for family in FAMILIES.values():
        if name in family.published:
            return family, family.declared(family.published[name](), NOTHING_NAMED)
    raise ConfigError(f"bench: expected a model among {', '.join(names())}, got {name}")


def normal(*shape: int) -> np.ndarray[Any, Any]:
    """Standard normal values, fp32, the same for the same shape."""
    return np.random.default_rng(list(shape)).standard_normal(shape, np.float32)


def conditioning(model: Model, resolution: int, size: int) -> Arrays:
    """Random arrays (size, ...) of the longest captions, and those that follow from the sides of an image."""
    captions = {name: normal(size, *shape) for name, shape in model.caption_shapes().items()}
    captions |= {p.rows: np.full(size, p.most, np.int32) for p in model.paddings.values() if p.rows}
    whole = (resolution, resolution)
    sizes = model.size_conditioning(Placement(whole, whole, whole, 0, 0))
    return captions | {name: np.stack([array] * size) for name, array in sizes.items()}
