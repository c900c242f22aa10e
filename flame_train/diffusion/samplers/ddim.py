"""DDIM without added noise (arXiv 2010.02502, eta = 0), as diffusers' `DDIMScheduler` with SDXL's configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flame_train.diffusion.samplers import Denoise, NoiseSampler, Sampler
from flame_train.engine import Tensor, no_grad

if TYPE_CHECKING:
    from .noise_path import NoisePath


class Ddim(Sampler):
    """It ends at the schedule's first timestep, where a little noise is left."""

    name = "ddim"
    usual_name = "DDIM"

    def sample(
        self, denoise: Denoise, noise: Tensor, cond: Any, path: NoisePath, noise_sampler: NoiseSampler
    ) -> Tensor:
        abar, stride = path.schedule.alphas_cumprod, path.schedule.steps // path.steps
        with no_grad():
            x = noise.float()
            for i, t in enumerate(path.times):
                before = abar[max(int(t) - stride, 0)]
                image, eps = _split(path.ask(denoise, x, i, cond), x, float(abar[t]), path.prediction)
                x = image * math.sqrt(before) + eps * math.sqrt(1.0 - before)
        return x


def _split(output: Tensor, x: Tensor, abar: float, prediction: str) -> tuple[Tensor, Tensor]:
    signal, noise = math.sqrt(abar), math.sqrt(1.0 - abar)
    if prediction == "epsilon":
        return (x - output * noise) * (1.0 / signal), output
    return x * signal - output * noise, output * signal + x * noise
