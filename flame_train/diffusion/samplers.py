"""Samplers: from noise to latents with a trained denoiser, as pure functions.

`denoise(x, t, cond)` takes (B, H, W, C) fp32, timesteps (B,) int64 and the conditioning. It returns the model's
prediction, epsilon or v. Results are those of diffusers' schedulers of the same names with SDXL's published
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import Tensor, no_grad
from ..engine import functional as F
from .objectives import Prediction
from .schedules import NoiseSchedule, Spacing, Table

Denoise = Callable[[Tensor, Tensor, Any], Tensor]
Sampler = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """What a sampler follows: the model's schedule, so many steps of it, what the model predicts, and the spacing."""

    schedule: NoiseSchedule
    steps: int
    prediction: Prediction = "epsilon"
    spacing: Spacing = "leading"

    def timesteps(self) -> Table:
        """The timesteps, from noise to image. Raises `ConfigError` if `steps` does not fit the schedule."""
        return self.schedule.timesteps(self.steps, self.spacing)


def guided(denoise: Denoise, guidance: float) -> Denoise:
    """Classifier-free guidance (arXiv 2207.12598): a denoiser whose `cond` is of twice as many samples as x has.

    The first half is the prompt, the second the negative prompt; both go through `denoise` as one batch. With a
    guidance of 1 there is no second half.
    """
    if guidance == 1.0:
        return denoise

    def both(x: Tensor, t: Tensor, cond: Any) -> Tensor:
        wanted, unwanted = F.chunk(denoise(F.cat([x, x]), F.cat([t, t]), cond), 2)
        return unwanted + (wanted - unwanted) * guidance

    return both


def ddim(denoise: Denoise, noise: Tensor, cond: Any, config: SamplerConfig) -> Tensor:
    """DDIM without added noise (arXiv 2010.02502, eta = 0). `noise` is standard normal (B, H, W, C).

    Args:
        denoise: gives the model's prediction for (x, t, cond).
        noise: standard normal (B, H, W, C).
        cond: the conditioning, passed to `denoise`.
        config: the noise schedule, the steps and what the model predicts.

    Returns:
        Latents (B, H, W, C), fp32.

    Raises:
        ConfigError: the number of steps does not fit the schedule.
    """
    times, schedule = config.timesteps(), config.schedule
    abar, stride = schedule.alphas_cumprod, schedule.steps // config.steps
    with no_grad():
        x = noise.float()
        for t in times:
            before = abar[max(int(t) - stride, 0)]
            image, eps = _split(denoise(x, _times(x, t), cond).float(), x, float(abar[t]), config.prediction)
            x = image * math.sqrt(before) + eps * math.sqrt(1.0 - before)
    return x


def _split(output: Tensor, x: Tensor, abar: float, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """The estimates of x_0 and of the noise."""
    signal, noise = math.sqrt(abar), math.sqrt(1.0 - abar)
    if prediction == "epsilon":
        return (x - output * noise) * (1.0 / signal), output
    return x * signal - output * noise, output * signal + x * noise


def euler(denoise: Denoise, noise: Tensor, cond: Any, config: SamplerConfig) -> Tensor:
    """Euler's method on dx / dsigma (arXiv 2206.00364, algorithm 2 without churn). `noise` is standard normal.

    x is the signal plus sigma times noise; the model gets x / sqrt(sigma^2 + 1).

    Args:
        denoise, noise, cond, config: as in `ddim`.

    Returns:
        Latents (B, H, W, C), fp32.

    Raises:
        ConfigError: as in `ddim`.
    """
    times = config.timesteps()
    sigmas = [*euler_sigmas(config.schedule)[times].tolist(), 0.0]
    first = sigmas[0]
    with no_grad():
        x = noise.float() * (math.sqrt(first**2 + 1.0) if config.spacing == "leading" else first)
        for i, t in enumerate(times):
            sigma = sigmas[i]
            seen = x * (1.0 / math.sqrt(sigma**2 + 1.0))
            slope = _slope(denoise(seen, _times(x, t), cond).float(), x, sigma, config.prediction)
            x = x + slope * (sigmas[i + 1] - sigma)
    return x


def euler_sigmas(schedule: NoiseSchedule) -> np.ndarray[Any, Any]:
    """Sigma by training timestep (T,); where no signal is left, that of abar = 2^-24 stands for infinity."""
    sigmas = schedule.sigmas
    return np.where(np.isfinite(sigmas), sigmas, math.sqrt((1.0 - 2.0**-24) / 2.0**-24))


def _slope(output: Tensor, x: Tensor, sigma: float, prediction: Prediction) -> Tensor:
    """dx / dsigma = (x - x_0) / sigma."""
    if prediction == "epsilon":
        return output
    variance = sigma**2 + 1.0
    return x * (sigma / variance) + output * (1.0 / math.sqrt(variance))


def _times(x: Tensor, t: int) -> Tensor:
    return Tensor(x.backend.xp.full((x.shape[0],), int(t), np.int64))
