"""Pseudo-Huber losses: squared for small errors, absolute for large ones, as sd-scripts' `conditional_loss`."""

from __future__ import annotations

import math
from typing import Literal

from flame_train.diffusion.losses import LossKind, NoiseLevel
from flame_train.engine import Tensor
from flame_train.settings import field


class Huber(LossKind):
    """2 d (sqrt(e^2 + d^2) - d) for an error e: e^2 far below the delta d, 2 d |e| far above.

    The delta is `huber_c`, or follows the noise level by sd-scripts' `huber_schedule`. "exponential" falls from 1 to
    huber_c. "snr" is (1 - huber_c) / (1 + sigma)^2 + huber_c. `huber_scale` multiplies all but "snr", as in
    sd-scripts.
    """

    name = "huber"

    huber_schedule: Literal["constant", "exponential", "snr"] = field(
        "constant", "how the delta follows the noise level; the others fall from 1 to huber_c"
    )
    huber_c: float = field(
        0.1, "delta: errors below it count squared, above it absolute", gt=0, le=1, aka=("huber_delta",)
    )
    huber_scale: float = field(1.0, "factor of the delta, but for snr", gt=0, le=1000)

    def errors(self, prediction: Tensor, target: Tensor, level: NoiseLevel) -> Tensor:
        delta = self._delta(level, prediction.ndim)
        return self._distance(prediction - target, delta) * (2.0 * delta)

    @staticmethod
    def _distance(error: Tensor, delta: Tensor | float) -> Tensor:
        return (error * error + delta * delta).sqrt() - delta

    def _delta(self, level: NoiseLevel, ndim: int) -> Tensor | float:
        if self.huber_schedule == "constant":
            return self.huber_c * self.huber_scale
        if self.huber_schedule == "exponential":
            deltas = (level.time() * math.log(self.huber_c)).exp() * self.huber_scale
        else:
            deltas = (1.0 - self.huber_c) / (1.0 + level.sigma()) ** 2 + self.huber_c
        return deltas.reshape(-1, *([1] * (ndim - 1)))


class SmoothL1(Huber):
    """2 (sqrt(e^2 + d^2) - d): e^2 / d far below the delta d, 2 |e| far above."""

    name = "smooth_l1"

    def errors(self, prediction: Tensor, target: Tensor, level: NoiseLevel) -> Tensor:
        return self._distance(prediction - target, self._delta(level, prediction.ndim)) * 2.0
