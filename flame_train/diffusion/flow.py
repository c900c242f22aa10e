"""Rectified flow: the straight way from image to noise, and the velocity along it (arXiv 2209.03003, 2403.03206).

x_s = (1 - s) x_0 + s noise for s in (0, 1), target noise - x_0. Latents are (B, H, W, C); s is fp32 (B,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from flame_train.diffusion.samplers import Denoise

from ..engine import Tensor
from ..engine.dtype import Array
from ..engine.random import Rng
from ..errors import ConfigError
from .losses import LossKind, NoiseLevel
from .losses.mse import Mse
from .noise import Noise
from .objectives import WHOLE, Span, TrainingObjective
from .timestep_sampling import TimestepSampling
from .timestep_sampling.logit_normal import LogitNormal
from .weightings import Weighting
from .weightings.none import NoWeighting

Shift = Callable[[int], float]
"""The shift of noise levels for a number of image tokens; see `shifted`."""


def constant_shift(shift: float) -> Shift:
    """Returns the same for every resolution: 3 is SD3's, 1 none."""
    return lambda tokens: shift


NO_SHIFT: Shift = constant_shift(1.0)
_MOST_STEPS: Final = 1000

TARGET = "target_level"
"""The name, in the conditioning, of the noise level that a step goes to."""


def resolution_shift(low: float = 0.5, high: float = 1.15, low_tokens: int = 256, high_tokens: int = 4096) -> Shift:
    """Returns Flux's: exp(mu), mu linear in the tokens through (256, 0.5) and (4096, 1.15)."""
    slope = (high - low) / (high_tokens - low_tokens)
    return lambda tokens: math.exp(low + slope * (tokens - low_tokens))


def shifted(sigma: Any, shift: float) -> Any:
    """Returns shift * s / (1 + (shift - 1) * s): more noise for a shift above 1 (arXiv 2403.03206, section 5.3.2)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


@dataclass(frozen=True, slots=True)
class FlowObjective(TrainingObjective):
    """The error of the velocity.

    `sampling` samples s before the shift; the shifted levels are scaled to `span`, in thousandths. `kind` is the
    distance to the target. `weighting` multiplies each sample's loss. `kinds` are the kinds of noise. `patch` is
    the side of a token in latent pixels.
    """

    sampling: TimestepSampling = field(default_factory=LogitNormal)
    shift: Shift = NO_SHIFT
    kind: LossKind = field(default_factory=Mse)
    weighting: Weighting = field(default_factory=NoWeighting)
    kinds: Noise = field(default_factory=Noise)
    patch: int = 2
    span: Span = WHOLE
    device: str = "cpu"
    _draw: Callable[[Rng], Array] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_draw", self.sampling.on(self.device))

    def timesteps(self, rng: Rng, shape: Sequence[int]) -> Tensor:
        """Returns (B,) fp32 in (0, 1) for latents of `shape` (H, W, C), or (F, H, W, C) of frames."""
        levels = self._draw(rng)
        if self.sampling.exact:
            return Tensor(levels)
        levels = shifted(levels, self.shift(math.prod(shape[:-1]) // self.patch**2)).astype(np.float32)
        if self.span == WHOLE:
            return Tensor(levels)
        low, high = (np.float32(end / 1000) for end in self.span)
        return Tensor(low + (high - low) * levels)

    def at_levels(self, levels: Tensor) -> Tensor:
        """Themselves: no shift and no span applies."""
        return levels

    def levels(self, t: Tensor) -> Tensor:
        """Themselves."""
        return t

    def noise(self, rng: Rng, latents: Tensor) -> Tensor:
        """Returns (B, H, W, C) fp32, the noise of the target."""
        return self.kinds.drawn(rng, latents)

    def mixed(self, rng: Rng, noise: Tensor) -> Tensor:
        """Returns the noise that is mixed into the latents; with input perturbation it differs from the target's."""
        return self.kinds.mixed(rng, noise)

    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns x_s, computed in fp32 and given in the latents' dtype."""
        s = _beside(t, latents)
        x: Tensor = (1.0 - s) * latents + s * noise
        return x.to(latents.dtype)

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the target of the prediction, fp32: the same for every s."""
        return noise.float() - latents.float()

    def noise_level(self, t: Tensor) -> NoiseLevel:
        return NoiseLevel(lambda: t, lambda: t / (1.0 - t))

    def weight(self, t: Tensor) -> Tensor | None:
        return None if self.weighting.uniform else Tensor(self.weighting.of_flow(t.data))


def _beside(t: Tensor, like: Tensor) -> Tensor:
    """Returns (B,) shaped to multiply `like`."""
    return t.reshape(t.shape[0], *([1] * (like.ndim - 1)))


# ---- sampling ----------------------------------------------------------------------------------------------


def static_sigmas(steps: int, shift: float) -> np.ndarray[Any, Any]:
    """`steps` noise levels and 0, as diffusers' flow scheduler spaces them for SD3: shifted, from the shifted ends."""
    ends = shifted(np.array([1.0, 1.0 / _MOST_STEPS]), shift)
    return _closed(shifted(np.linspace(ends[0], ends[1], _checked(steps)), shift))


def dynamic_sigmas(
    steps: int,
    shift: float,
    terminal: float | None = None,
    published: Sequence[float] = (),
) -> np.ndarray[Any, Any]:
    """Returns `steps` noise levels and 0, as diffusers' Flux pipeline has them: evenly from 1 to 1 / steps, shifted.

    Args:
        steps: how many; ConfigError for more than 1000.
        shift: see `shifted`.
        terminal: the last level before 0, to which the shifted ones are then stretched; None: they are not.
        published: the levels before their shift of a model that was distilled to as many steps, instead of even ones.
    """
    even = np.linspace(1.0, 1.0 / _checked(steps), steps)
    levels = shifted(np.array(published) if len(published) == steps else even, shift)
    if terminal is not None and steps > 1:
        levels = 1.0 - (1.0 - levels) * (1.0 - terminal) / (1.0 - levels[-1])
    return _closed(levels)


class FlowPath:
    """The way along the flow through the noise levels `sigmas`, which fall from 1 to 0; see `samplers.Path`."""

    def __init__(self, sigmas: np.ndarray[Any, Any]) -> None:
        self.levels = tuple(sigmas.tolist())

    def begin(self, noise: Tensor) -> Tensor:
        """Pure noise."""
        return noise.float()

    def slope(self, denoise: Denoise, x: Tensor, i: int, cond: Any) -> Tensor:
        """Returns the velocity, which is the model's prediction."""
        s = Tensor(x.backend.xp.full((x.shape[0],), self.levels[i], np.float32))
        return denoise(x, s, cond).float()


class FlowMapPath(FlowPath):
    """The same for a flow map, which is told where a step goes to: fp32 (1,), as `TARGET` of the conditioning."""

    def slope(self, denoise: Denoise, x: Tensor, i: int, cond: Any) -> Tensor:
        """Returns the mean velocity from a level to the next, which is the model's prediction."""
        target = Tensor(x.backend.xp.full((1,), self.levels[i + 1], np.float32))
        return super().slope(denoise, x, i, {**cond, TARGET: target})


def _closed(sigmas: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.append(sigmas, 0.0)


def _checked(steps: int) -> int:
    if not 1 <= steps <= _MOST_STEPS:
        raise ConfigError(f"sample.steps: expected 1 to {_MOST_STEPS}, got {steps}")
    return steps
