"""DPM-Solver++ of second order with two models in memory (arXiv 2211.01095), as k-diffusion's `sample_dpmpp_2m`."""

from __future__ import annotations

import math
from typing import Any

from flame_train.diffusion.samplers import Denoise, NoiseSampler, Path, Sampler
from flame_train.engine import Tensor, no_grad


class Dpmpp2M(Sampler):
    """x' = (b / a) x + (1 - b / a) D from level a to level b: exact for a constant image D.

    D extrapolates the model's last two images along the logarithm of the level. The first step and the last one, which
    ends at 0, have one image.
    """

    name = "dpmpp_2m"
    aka = ("dpm++ 2m", "dpmsolver++", "dpmsolver", "dpmsingle", "k_dpmpp_2m", "dpm_2m")
    usual_name = "DPM++ 2M"

    def sample(self, denoise: Denoise, noise: Tensor, cond: Any, path: Path, noise_sampler: NoiseSampler) -> Tensor:
        levels, before = path.levels, None
        with no_grad():
            x = path.begin(noise)
            for i in range(len(levels) - 1):
                now, then = levels[i], levels[i + 1]
                image = x - path.slope(denoise, x, i, cond) * now
                estimate = image
                if before is not None and then > 0.0:
                    ratio = math.log(levels[i - 1] / now) / math.log(now / then)
                    estimate = image + (image - before) * (0.5 / ratio)
                x = x * (then / now) + estimate * (1.0 - then / now)
                before = image
        return x
