"""The beta distribution, as SimpleTuner's `flow_use_beta_schedule`; with both numbers at 0.6 that of many samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling, table_on
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import field

_POINTS = 1 << 13
_GRID = 1 << 16


class Beta(TimestepSampling):
    """A level's density is s^(a - 1) (1 - s)^(b - 1). A table of quantiles turns uniform numbers into levels."""

    name = "beta"

    beta_a: float = field(
        2.0, "first number of the distribution; larger: more noise", ge=0.5, le=100, aka=("flow_beta_schedule_alpha",)
    )
    beta_b: float = field(
        2.0, "second number of the distribution; larger: less noise", ge=0.5, le=100, aka=("flow_beta_schedule_beta",)
    )

    def on(self, device: str) -> Callable[[Rng], Array]:
        table = table_on(device, self._quantiles())

        def levels(rng: Rng) -> Array:
            place = rng.uniform(Stream.TIMESTEPS) * np.float32(_POINTS)
            low = place.astype(np.int64)
            below, above = table[low], table[low + 1]
            return below + (place - low.astype(np.float32)) * (above - below)

        return levels

    def levels(self, rng: Rng) -> Array:
        return self.on("cpu")(rng)

    def _quantiles(self) -> np.ndarray[Any, Any]:
        """Computes the quantiles over x with s = sin^2 x, where the density is finite for a, b >= 1/2."""
        x = np.linspace(0.0, math.pi / 2, _GRID + 1)
        middle = 0.5 * (x[1:] + x[:-1])
        density = np.sin(middle) ** (2.0 * self.beta_a - 1.0) * np.cos(middle) ** (2.0 * self.beta_b - 1.0)
        share = np.concatenate([[0.0], np.cumsum(density)])
        return np.sin(np.interp(np.linspace(0.0, 1.0, _POINTS + 1), share / share[-1], x)) ** 2
