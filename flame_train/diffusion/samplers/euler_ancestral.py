"""Euler's method with new noise in each step, as k-diffusion's `sample_euler_ancestral` with eta = 1."""

from __future__ import annotations

import math
from typing import Any

from flame_train.diffusion.samplers import Denoise, NoiseSampler, Path, Sampler
from flame_train.engine import Tensor, no_grad


class EulerAncestral(Sampler):
    """From level a to b a step goes down to sqrt(b^2 - u^2) and adds u times noise, u = b sqrt(a^2 - b^2) / a."""

    name = "euler_ancestral"
    aka = ("euler_a", "euler a", "k_euler_a", "k_euler_ancestral")
    usual_name = "Euler a"

    def sample(self, denoise: Denoise, noise: Tensor, cond: Any, path: Path, noise_sampler: NoiseSampler) -> Tensor:
        levels = path.levels
        with no_grad():
            x = path.begin(noise)
            for i in range(len(levels) - 1):
                now, then = levels[i], levels[i + 1]
                up = then * math.sqrt(now**2 - then**2) / now
                down = math.sqrt(then**2 - up**2)
                x = x + path.slope(denoise, x, i, cond) * (down - now)
                if then > 0.0:
                    x = x + noise_sampler(i) * up
        return x
