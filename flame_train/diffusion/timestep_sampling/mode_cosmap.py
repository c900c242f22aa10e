"""The two further distributions of arXiv 2403.03206, section 3.1: mode sampling and CosMap."""

from __future__ import annotations

import math

import numpy as np

from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import field


class Mode(TimestepSampling):
    """A `mode_scale` above 2 / (pi - 2), about 1.75, is refused: the map would not be one to one."""

    name = "mode"

    mode_scale: float = field(1.29, "how far mode sampling is from uniform", ge=0, le=1.75)

    def levels(self, rng: Rng) -> Array:
        u = rng.uniform(Stream.TIMESTEPS)
        bend = rng.xp.cos(np.float32(math.pi / 2) * u) ** 2 - 1.0 + u
        levels: Array = 1.0 - u - np.float32(self.mode_scale) * bend
        return levels


class CosmapSampling(TimestepSampling):
    name = "cosmap"

    def levels(self, rng: Rng) -> Array:
        u = rng.uniform(Stream.TIMESTEPS)
        levels: Array = 1.0 - 1.0 / (rng.xp.tan(np.float32(math.pi / 2) * u) + 1.0)
        return levels
