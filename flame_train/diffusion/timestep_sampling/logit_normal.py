"""The sigmoid of a normal number (arXiv 2403.03206, section 3.1): "logit_normal", or "sigmoid" in some trainers."""

from __future__ import annotations

import numpy as np

from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import field


class LogitNormal(TimestepSampling):
    name = "logit_normal"

    logit_mean: float = field(
        0.0,
        "mean of the normal number; above 0: more noise. diffusers' SD3 script counts the other way",
        ge=-10,
        le=10,
        aka=("timestep_mean",),
    )
    logit_std: float = field(
        1.0, "standard deviation of the normal number", gt=0, le=10, aka=("timestep_std", "sigmoid_scale")
    )

    def levels(self, rng: Rng) -> Array:
        z = rng.normal(Stream.TIMESTEPS) * np.float32(self.logit_std) + np.float32(self.logit_mean)
        levels: Array = 1.0 / (1.0 + rng.xp.exp(-z))
        return levels


class Sigmoid(LogitNormal):
    name = "sigmoid"


class Auto(LogitNormal):
    """Each family's published choice: logit-normal for SD3 and Flux, uniform for SDXL."""

    name = "auto"
    even = True
