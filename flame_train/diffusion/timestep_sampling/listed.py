"""Timesteps that the config lists, each as likely as any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling, table_on
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import field


class Listed(TimestepSampling):
    """A timestep t is the noise level t / 1000 of a flow. One that is listed twice comes twice as often."""

    name = "list"
    exact = True

    timestep_list: tuple[int, ...] = field((), "the timesteps, from 0 to 999", aka=("custom_timesteps",))

    def problems(self, config: Any) -> Mapping[str, str]:
        outside = [t for t in self.timestep_list if not 0 <= t < 1000]
        if outside:
            return {"timestep_list": f"expected timesteps from 0 to 999, got {outside[0]}"}
        return {} if self.timestep_list else {"timestep_list": "expected at least one timestep, got none"}

    def on(self, device: str) -> Callable[[Rng], Array]:
        table = table_on(device, np.array(self.timestep_list) / 1000.0)
        return lambda rng: table[rng.randint(Stream.TIMESTEPS, len(self.timestep_list))]

    def levels(self, rng: Rng) -> Array:
        return self.on("cpu")(rng)
