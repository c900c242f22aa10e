"""Euler's method (arXiv 2206.00364, algorithm 2 without churn), as diffusers' `EulerDiscreteScheduler`."""

from __future__ import annotations

from typing import Any

from flame_train.diffusion.samplers import Denoise, NoiseSampler, Path, Sampler
from flame_train.engine import Tensor, no_grad


class Euler(Sampler):
    name = "euler"
    aka = ("k_euler", "euler_discrete", "ddpm", "flowmatch")
    usual_name = "Euler"
    flow = True

    def sample(self, denoise: Denoise, noise: Tensor, cond: Any, path: Path, noise_sampler: NoiseSampler) -> Tensor:
        levels = path.levels
        with no_grad():
            x = path.begin(noise)
            for i in range(len(levels) - 1):
                x = x + path.slope(denoise, x, i, cond) * (levels[i + 1] - levels[i])
        return x
