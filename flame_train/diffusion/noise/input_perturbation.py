"""Input perturbation (arXiv 2301.11706): the denoiser's input has a little more noise than its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flame_train.diffusion.noise import NoiseKind
from flame_train.diffusion.random_streams import Stream
from flame_train.engine import Tensor
from flame_train.engine.random import Rng
from flame_train.settings import field


class InputPerturbation(NoiseKind):
    """noise + gamma * n is mixed into the latents; the target keeps the noise. sd-scripts' `ip_noise_gamma`."""

    name = "input_perturbation"
    order = 3

    input_perturbation: float = field(
        0.0,
        "strength of noise in the input that the target lacks; 0: off, 0.1 is usual",
        ge=0,
        le=1,
        aka=("ip_noise_gamma",),
    )
    input_perturbation_random: bool = field(
        False, "the strength is random, between 0 and input_perturbation", aka=("ip_noise_gamma_random_strength",)
    )

    @property
    def on(self) -> bool:
        return self.input_perturbation > 0

    def problems(self, config: Any) -> Mapping[str, str]:
        if self.on or not self.input_perturbation_random:
            return {}
        return {"input_perturbation_random": "expected loss.input_perturbation above 0 with it"}

    def mixed(self, noise: Tensor, rng: Rng) -> Tensor:
        strength: Any = np.float32(self.input_perturbation)
        if self.input_perturbation_random:
            strength = strength * rng.uniform(Stream.PERTURBATION_STRENGTH, [1] * (noise.ndim - 1))
        return Tensor(noise.data + strength * rng.normal(Stream.PERTURBATION, noise.shape[1:]))
