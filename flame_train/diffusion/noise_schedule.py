"""Noise schedules: how much of the image is left at each of the timesteps a model was trained on.

x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise (DDPM, arXiv 2006.11239). All tables are small and on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError

Spacing = Literal["leading", "trailing"]
Table = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False, slots=True)
class NoiseSchedule:
    """abar_t for t = 0 .. T - 1 (fp64), falling."""

    alphas_cumprod: Table

    @classmethod
    def scaled_linear(cls, start: float = 0.00085, end: float = 0.012, steps: int = 1000) -> NoiseSchedule:
        """Betas whose roots are evenly spaced: Stable Diffusion's and SDXL's schedule.

        It rounds to fp32 where the reference implementations round. So the table has the bits that published models
        were trained on. Each root is one multiply-add from the nearer end.
        """
        first, last = np.float32(start**0.5), np.float32(end**0.5)
        width = np.float64((last - first) / np.float32(steps - 1))
        i = np.arange(steps)
        roots = np.where(i < steps // 2, first + width * i, last - width * (steps - 1 - i)).astype(np.float32)
        alphas = np.float32(1.0) - roots * roots
        return cls(np.cumprod(alphas.astype(np.float64)).astype(np.float32).astype(np.float64))

    @property
    def steps(self) -> int:
        """T, the number of training timesteps."""
        return len(self.alphas_cumprod)

    @property
    def snr(self) -> Table:
        """Signal-to-noise ratio by timestep: abar / (1 - abar)."""
        return self.alphas_cumprod / (1.0 - self.alphas_cumprod)

    @property
    def sigmas(self) -> Table:
        """Noise over signal by timestep: sqrt((1 - abar) / abar). Infinite where no signal is left."""
        with np.errstate(divide="ignore"):
            return np.sqrt((1.0 - self.alphas_cumprod) / self.alphas_cumprod)

    def zero_terminal_snr(self) -> NoiseSchedule:
        """Returns the schedule shifted and scaled to zero signal at the last timestep (arXiv 2305.08891, alg. 1)."""
        root = np.sqrt(self.alphas_cumprod)
        return NoiseSchedule(((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2)

    def timesteps(self, count: int, spacing: Spacing = "leading", offset: int = 1) -> Table:
        """Returns `count` timesteps to sample at, falling (int64), as diffusers' schedulers space them.

        "leading" takes multiples of T // count plus `offset` (SDXL's published configuration), "trailing" counts
        down from T - 1 (needed with zero terminal SNR). Raises `ConfigError` if that leaves 0 .. T - 1.
        """
        if count < 1:
            raise ConfigError(f"sample.steps: expected at least 1, got {count}")
        if spacing == "leading":
            steps = np.arange(count, dtype=np.int64)[::-1] * (self.steps // count) + offset
        else:
            steps = np.round(np.arange(self.steps, 0, -self.steps / count)).astype(np.int64) - 1
        if count > self.steps or steps[0] >= self.steps:
            raise ConfigError(
                f"sample.steps: {count} {spacing} steps do not fit into the model's {self.steps} timesteps; "
                "ask for fewer"
            )
        return steps
