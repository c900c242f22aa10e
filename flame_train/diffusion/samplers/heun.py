"""Heun's method (arXiv 2206.00364, algorithm 1), as diffusers' `HeunDiscreteScheduler`: the mean of two slopes.

It asks the model twice a step, but for the last one, which is Euler's.
"""

from __future__ import annotations

from typing import Any

from flame_train.diffusion.samplers import Denoise, NoiseSampler, Path, Sampler
from flame_train.engine import Tensor, no_grad


class Heun(Sampler):
    name = "heun"
    aka = ("k_heun",)
    usual_name = "Heun"
    flow = True
    calls = 2

    def sample(self, denoise: Denoise, noise: Tensor, cond: Any, path: Path, noise_sampler: NoiseSampler) -> Tensor:
        levels = path.levels
        with no_grad():
            x = path.begin(noise)
            for i in range(len(levels) - 1):
                width = levels[i + 1] - levels[i]
                slope = path.slope(denoise, x, i, cond)
                if levels[i + 1] > 0.0:
                    slope = (slope + path.slope(denoise, x + slope * width, i + 1, cond)) * 0.5
                x = x + slope * width
        return x
