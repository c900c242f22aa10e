"""Every noise level is as likely as any other."""

from __future__ import annotations

from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng


class Uniform(TimestepSampling):
    name = "uniform"
    even = True

    def levels(self, rng: Rng) -> Array:
        return rng.uniform(Stream.TIMESTEPS)
