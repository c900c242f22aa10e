"""Every noise level is as likely as any other."""

from __future__ import annotations

from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng

from .kind import Stream, TimestepSampling


class Uniform(TimestepSampling):
    name = "uniform"
    even = True

    def levels(self, rng: Rng) -> Array:
        return rng.uniform(Stream.TIMESTEPS)
