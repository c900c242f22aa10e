"""Immiscible noise (arXiv 2406.12303): within a batch, each image gets noise that is near to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from flame_train.diffusion.noise import NoiseKind
from flame_train.engine import Tensor
from flame_train.engine.dtype import Array
from flame_train.engine.namespace import Namespace
from flame_train.engine.random import Rng
from flame_train.settings import field

MOST: Final = 64
"""The largest batch: the rule takes as many rounds as there are images."""


class ImmiscibleNoise(NoiseKind):
    """It assigns the batch's noises to its images greedily: the nearest pair first, then the nearest of the rest, and
    so on. The paper's assignment has the least sum of distances, for which no fixed number of steps is known.
    """

    name = "immiscible"
    order = 2

    immiscible_noise: bool = field(
        False, "each image of a batch gets noise that is near to it", aka=("optimal_noise_pairing_samples",)
    )

    @property
    def on(self) -> bool:
        return self.immiscible_noise

    def problems(self, config: Any) -> Mapping[str, str]:
        sizes = [own.batch_size for own in config.data.sets if "batch_size" in own.model_fields_set]
        wrong = [size for size in (*sizes, config.data.batch_size) if not 2 <= size <= MOST]
        if not self.on or not wrong:
            return {}
        return {"immiscible_noise": f"expected data.batch_size from 2 to {MOST} with it, got {wrong[0]}"}

    def changed(self, noise: Tensor, latents: Tensor, rng: Rng) -> Tensor:
        b = noise.shape[0]
        images, noises = latents.float().reshape(b, -1), noise.reshape(b, -1)
        squares = (images * images).sum(1, keepdim=True) + (noises * noises).sum(1).reshape(1, b)
        distances = squares - (images @ noises.transpose(0, 1)) * 2.0
        return Tensor(noise.data[nearest_first(rng.xp, distances.data)])


def nearest_first(xp: Namespace, distances: Array) -> Array:
    """Assigns a column (B,) int64 to each row of a matrix (B, B): the least entry first, then the least of the rest.

    Of equal entries the first in memory is taken.
    """
    size = distances.shape[0]
    places = xp.arange(size, dtype=np.int64)
    order = xp.zeros(size, np.int64)
    for _ in range(size):
        least = distances.reshape(-1).argmin().astype(np.int64)
        row, column = least // size, least % size
        order = xp.where(places == row, column, order)
        gone = (places == row).reshape(-1, 1) | (places == column).reshape(1, -1)
        distances = xp.where(gone, np.float32(np.inf), distances)
    return order
