"""Offset noise: a constant added to each channel, so that brightness is learnt too, as sd-scripts' `noise_offset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flame_train.diffusion.noise import NoiseKind
from flame_train.diffusion.random_streams import Stream
from flame_train.engine import Tensor
from flame_train.engine.random import Rng
from flame_train.settings import field


class OffsetNoise(NoiseKind):
    """noise + strength * n with a normal number n a channel.

    The strength is `offset_noise`, or uniform between 0 and it for each sample. `offset_noise_adaptive` times the
    magnitude of the channel's mean in the latents is added. It is never below 0.
    """

    name = "offset"
    order = 0

    offset_noise: float = field(
        0.0, "strength of a constant added to each channel's noise; 0: off", ge=0, le=1, aka=("noise_offset",)
    )
    offset_noise_random: bool = field(
        False, "the strength is random, between 0 and offset_noise", aka=("noise_offset_random_strength",)
    )
    offset_noise_adaptive: float = field(
        0.0, "added to the strength for each unit of the channel's mean", ge=-10, le=10, aka=("adaptive_noise_scale",)
    )

    @property
    def on(self) -> bool:
        return self.offset_noise > 0

    def problems(self, config: Any) -> Mapping[str, str]:
        if self.on:
            return {}
        options = {"offset_noise_random": self.offset_noise_random, "offset_noise_adaptive": self.offset_noise_adaptive}
        return {key: "expected loss.offset_noise above 0 with it" for key, value in options.items() if value}

    def changed(self, noise: Tensor, latents: Tensor, rng: Rng) -> Tensor:
        offset = rng.normal(Stream.OFFSET, (*(1 for _ in noise.shape[1:-1]), noise.shape[-1]))
        return Tensor(noise.data + self._strength(latents, rng) * offset)

    def _strength(self, latents: Tensor, rng: Rng) -> Any:
        strength: Any = np.float32(self.offset_noise)
        if self.offset_noise_random:
            strength = strength * rng.uniform(Stream.OFFSET_STRENGTH, [1] * (latents.ndim - 1))
        if self.offset_noise_adaptive:
            mean = latents.float().mean(tuple(range(1, latents.ndim - 1)), keepdim=True).data
            strength = rng.xp.maximum(strength + np.float32(self.offset_noise_adaptive) * abs(mean), np.float32(0.0))
        return strength
