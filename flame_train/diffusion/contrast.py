"""Contrastive guidance: the loss of a guidance-distilled model, whose prediction is already guided.

Such a model predicts g = u + s (c - u), u without a prompt and c with it, s the scale of its guidance. What images
teach is c. So the prediction p is turned back into c's space, c = (p + (s - 1) u) / s, and compared there. u is the
current model's, without a gradient. ai-toolkit compares in g's space, which is this loss times s^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..engine import Tensor
from ..engine.random import Rng
from .random_streams import Stream

NO_PROMPT: Final = "unprompted"
"""The name of the further caption that is empty."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Each sample's scale lies between `low` and `high`; with `by_level` it falls to 1 towards the image."""

    low: float
    high: float
    by_level: bool = False

    @classmethod
    def of(cls, scale: float | str | tuple[float, float], schedule: str) -> Contrast | None:
        """Takes it of `loss.contrastive_scale` and `loss.contrastive_schedule`; None where it is off."""
        if isinstance(scale, str):
            return None
        low, high = scale if isinstance(scale, tuple) else (scale, scale)
        return cls(low, high, schedule == "sigma")

    def scales(self, rng: Rng, levels: Tensor) -> Tensor:
        """Returns (B,) fp32, the scales of samples at these noise levels (B,)."""
        drawn = np.float32(self.low)
        if self.high > self.low:
            drawn = drawn + np.float32(self.high - self.low) * rng.uniform(Stream.CONTRAST)
        scales = Tensor(rng.xp.zeros(levels.shape, np.float32) + drawn)
        return 1.0 + (scales - 1.0) * levels if self.by_level else scales

    @staticmethod
    def unguided(prediction: Tensor, scales: Tensor, without: Tensor) -> Tensor:
        """Returns c of the prediction p and of u, `without`; all fp32 (B, H, W, C)."""
        s = scales.reshape(scales.shape[0], *([1] * (without.ndim - 1)))
        return (prediction + (s - 1.0) * without) / s
