"""Pyramid noise: coarser and coarser noise is added, as sd-scripts' `pyramid_noise_like` ("multires noise")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flame_train.diffusion.noise import NoiseKind
from flame_train.diffusion.random_streams import Stream
from flame_train.engine import Tensor
from flame_train.engine.dtype import Array
from flame_train.engine.namespace import Namespace
from flame_train.engine.random import Rng
from flame_train.settings import field


class PyramidNoise(NoiseKind):
    """noise + sum over i of discount^i times noise of 1 / r^i of the size, enlarged bilinearly; then of deviation 1.

    The r of each level is uniform in [2, 4) for each sample. sd-scripts has one r for the batch, and divides by the
    batch's deviation. Levels end with one that is a single row or column. Sizes differ by sample, while a captured
    step has fixed shapes. So each level has its largest size, and weights select the part that counts.
    """

    name = "pyramid"
    order = 1

    pyramid_noise: int = field(
        0, "levels of pyramid noise; 0: off; 6 to 10 are usual", ge=0, le=10, aka=("multires_noise_iterations",)
    )
    pyramid_noise_discount: float = field(
        0.3, "strength of a level in terms of the one before it", gt=0, le=1, aka=("multires_noise_discount",)
    )

    @property
    def on(self) -> bool:
        return self.pyramid_noise > 0

    def problems(self, config: Any) -> Mapping[str, str]:
        if self.on or self.pyramid_noise_discount == 0.3:
            return {}
        return {"pyramid_noise_discount": "expected loss.pyramid_noise above 0 with it"}

    def changed(self, noise: Tensor, latents: Tensor, rng: Rng) -> Tensor:
        if noise.ndim > 4:  # frames are further channels
            b, f, h, w, c = noise.shape
            folded = noise.permute(0, 2, 3, 1, 4).reshape(b, h, w, f * c)
            return self.changed(folded, latents, rng).reshape(b, h, w, f, c).permute(0, 3, 1, 2, 4)
        h, w, c = noise.shape[1:]
        sizes = [(max(1, h >> i), max(1, w >> i)) for i in range(self.pyramid_noise)]
        drawn = rng.normal(Stream.PYRAMID, (sum(rows * columns for rows, columns in sizes), c))
        scales = np.float32(2.0) + np.float32(2.0) * rng.uniform(Stream.PYRAMID_SCALE, (self.pyramid_noise,))
        total, start, going = noise, 0, None
        for i, (rows, columns) in enumerate(sizes):
            grid = Tensor(drawn[:, start : start + rows * columns].reshape(-1, rows, columns, c))
            start += rows * columns
            shrink = scales[:, i] ** i
            high, wide = (rng.xp.maximum(rng.xp.floor(np.float32(n) / shrink), np.float32(1.0)) for n in (h, w))
            level = enlarged(rng.xp, grid, (h, w), high, wide)
            strength = rng.xp.ones_like(shrink) * np.float32(self.pyramid_noise_discount**i)
            strength = strength if going is None else rng.xp.where(going, strength, np.float32(0.0))
            total = total + level * Tensor(strength.reshape(-1, 1, 1, 1))
            more = (high > 1) & (wide > 1)
            going = more if going is None else going & more
        return total / total.std((1, 2, 3), keepdim=True)


def enlarged(xp: Namespace, grid: Tensor, size: tuple[int, int], high: Array, wide: Array) -> Tensor:
    """Returns (B, height, width, C): the first rows and columns of each grid, bilinearly, corners not aligned.

    Args:
        grid: (B, h, w, C).
        size: (height, width) of the result.
        high, wide: (B,), the number of rows and of columns that are enlarged in each grid.
    """
    b, rows, columns, c = grid.shape
    down, across = _weights(xp, size[0], rows, high), _weights(xp, size[1], columns, wide)
    tall = (down @ grid.reshape(b, rows, columns * c)).reshape(b, size[0], columns, c)
    result: Tensor = across.reshape(b, 1, size[1], columns) @ tall
    return result


def _weights(xp: Namespace, size: int, most: int, count: Array) -> Tensor:
    """Returns (B, size, most): how much each of the first `count` (B,) entries counts in each of `size` places."""
    count = count.reshape(-1, 1, 1)
    places = (xp.arange(size, dtype=np.float32) + np.float32(0.5)).reshape(1, -1, 1) * (count / np.float32(size))
    places = xp.maximum(xp.minimum(places - np.float32(0.5), count - np.float32(1.0)), np.float32(0.0))
    distance = abs(places - xp.arange(most, dtype=np.float32).reshape(1, 1, -1))
    return Tensor(xp.maximum(np.float32(1.0) - distance, np.float32(0.0)))
