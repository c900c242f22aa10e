"""The way from noise to image of a model with a noise schedule, as samplers follow it.

x is the image plus sigma times noise, and the model gets x / sqrt(sigma^2 + 1) (arXiv 2206.00364). Timesteps and sigmas
are those of diffusers' schedulers with SDXL's published configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flame_train.diffusion.noise_schedule import NoiseSchedule, Spacing, Table
from flame_train.diffusion.objectives import Prediction
from flame_train.diffusion.samplers import Denoise
from flame_train.engine import Tensor


@dataclass(frozen=True, slots=True)
class NoisePath:
    """So many steps of a schedule.

    Attributes:
        schedule: the model's noise schedule.
        steps: the number of steps.
        prediction: what the model predicts.
        spacing: how the timesteps are spaced.
        times: the timesteps, from noise to image.
        levels: the sigma of each, and 0.

    Raises:
        ConfigError: `steps` does not fit the schedule.
    """

    schedule: NoiseSchedule
    steps: int
    prediction: Prediction = "epsilon"
    spacing: Spacing = "leading"
    times: Table = field(init=False)
    levels: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        times = self.schedule.timesteps(self.steps, self.spacing)
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "levels", (*_finite_sigmas(self.schedule)[times].tolist(), 0.0))

    def begin(self, noise: Tensor) -> Tensor:
        """Returns x at the first level, from standard normal noise."""
        first = self.levels[0]
        return noise.float() * (math.sqrt(first**2 + 1.0) if self.spacing == "leading" else first)

    def slope(self, denoise: Denoise, x: Tensor, i: int, cond: Any) -> Tensor:
        """Returns dx / dsigma = (x - x_0) / sigma at level i."""
        sigma = self.levels[i]
        variance = sigma**2 + 1.0
        output = self.ask(denoise, x * (1.0 / math.sqrt(variance)), i, cond)
        if self.prediction == "epsilon":
            return output
        return x * (sigma / variance) + output * (1.0 / math.sqrt(variance))

    def ask(self, denoise: Denoise, seen: Tensor, i: int, cond: Any) -> Tensor:
        """Returns the model's prediction, fp32, for its input at level i."""
        return denoise(seen, _at_time(seen, self.times[i]), cond).float()


def _finite_sigmas(schedule: NoiseSchedule) -> np.ndarray[Any, Any]:
    """Returns sigma by training timestep (T,); where no signal is left, that of abar = 2^-24 stands for infinity."""
    sigmas = schedule.sigmas
    return np.where(np.isfinite(sigmas), sigmas, math.sqrt((1.0 - 2.0**-24) / 2.0**-24))


def _at_time(x: Tensor, t: int) -> Tensor:
    return Tensor(x.backend.xp.full((x.shape[0],), int(t), np.int64))
