"""The training objective of a denoiser: timestep, noise, noised latents, target and loss.

Latents are (B, H, W, C), or (B, F, H, W, C) of frames. Random numbers come from `engine.random` by (seed, stream,
step, global sample index), and tables live on the device. No function here reads a value back, so a step can be
captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from flame_train.diffusion.noise_schedule import NoiseSchedule

from ..engine import Tensor
from ..engine import functional as F
from ..engine.backend import get_backend
from ..engine.random import Rng
from .losses import LossKind, NoiseLevel
from .losses.mse import Mse
from .noise import Noise
from .random_streams import Stream
from .timestep_sampling import TimestepSampling
from .timestep_sampling.uniform import Uniform
from .weightings import Weighting
from .weightings.none import NoWeighting

Prediction = Literal["epsilon", "v"]

Span = tuple[int, int]
"""The least timestep, and the one after the greatest, of 0 to 1000."""

WHOLE: Span = (0, 1000)


def mean_errors(
    kind: LossKind, prediction: Tensor, target: Tensor, level: NoiseLevel, factors: Tensor | None = None
) -> Tensor:
    """Returns each sample's mean error, (B,) fp32.

    Args:
        kind: the distance.
        prediction: the denoiser's prediction (B, H, W, C).
        target: fp32 (B, H, W, C).
        level: how noisy each sample is.
        factors: fp32 (B, H, W, 1) or (B, 1, 1, 1), by which errors are multiplied: of masks, and of whole samples.
    """
    errors = kind.errors(prediction.float(), target, level)
    if factors is not None:
        errors = errors * factors
    return errors.mean(tuple(range(1, errors.ndim)))


class TrainingObjective(ABC):
    """How latents are noised, and the loss of a prediction. All on the device."""

    __slots__ = ()

    kind: LossKind
    """The distance to the target."""

    @abstractmethod
    def timesteps(self, rng: Rng, shape: Sequence[int]) -> Tensor:
        """Returns (B,) positions in the schedule, for latents of `shape` (H, W, C), as the denoiser gets them."""

    @abstractmethod
    def at_levels(self, levels: Tensor) -> Tensor:
        """Returns (B,) positions in the schedule of noise levels in (0, 1), fp32; 1 is pure noise."""

    @abstractmethod
    def levels(self, t: Tensor) -> Tensor:
        """Returns (B,) fp32, the noise levels of positions in the schedule."""

    @abstractmethod
    def noise(self, rng: Rng, latents: Tensor) -> Tensor:
        """Returns (B, H, W, C) fp32, the noise of the target, for latents of this shape."""

    @abstractmethod
    def mixed(self, rng: Rng, noise: Tensor) -> Tensor:
        """Returns the noise that is mixed into the latents; with input perturbation it differs from the target's."""

    @abstractmethod
    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the denoiser's input, computed in fp32 and given in the latents' dtype."""

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns what a prediction should be (B, H, W, C), fp32."""

    @abstractmethod
    def noise_level(self, t: Tensor) -> NoiseLevel:
        """Returns how noisy the samples are, for losses that depend on it."""

    @abstractmethod
    def weight(self, t: Tensor) -> Tensor | None:
        """Returns each sample's weight (B,), fp32; None: 1."""

    def losses(
        self,
        prediction: Tensor,
        latents: Tensor,
        noise: Tensor,
        t: Tensor,
        factors: Tensor | None = None,
        target: Tensor | None = None,
    ) -> Tensor:
        """Returns each sample's mean error times its weight, (B,) fp32.

        Args:
            prediction: the denoiser's prediction (B, H, W, C).
            latents: the latents without noise (B, H, W, C).
            noise: the noise of the target (B, H, W, C).
            t: (B,) positions in the schedule.
            factors: fp32 (B, H, W, 1) or (B, 1, 1, 1), by which errors are multiplied: of masks, and of whole samples.
            target: fp32 (B, H, W, C), what the prediction should be; None: `target`.
        """
        expected = self.target(latents, noise, t) if target is None else target
        each = mean_errors(self.kind, prediction, expected, self.noise_level(t), factors)
        weight = self.weight(t)
        return each if weight is None else each * weight


class Objective(TrainingObjective):
    """Diffusion loss on the noise ("epsilon") or on v = sqrt(abar) noise - sqrt(1 - abar) x_0 (arXiv 2202.00512)."""

    def __init__(
        self,
        schedule: NoiseSchedule,
        prediction: Prediction = "epsilon",
        *,
        kind: LossKind | None = None,
        weighting: Weighting | None = None,
        sampling: TimestepSampling | None = None,
        span: Span = WHOLE,
        noise: Noise | None = None,
        device: str = "cpu",
    ) -> None:
        """Puts the tables of the schedule onto the device.

        Args:
            schedule: the noise schedule.
            prediction: the target: "epsilon" or "v".
            kind: the loss function; None: the mean squared error.
            weighting: the weight of a noise level; None: 1.
            sampling: the distribution of timesteps; None: uniform.
            span: the range of timesteps that is trained.
            noise: the kinds of noise that are mixed; None: standard normal noise.

        Raises:
            ValueError: zero terminal SNR with prediction "epsilon": the last timestep has no signal to recover.
        """
        if prediction == "epsilon" and schedule.alphas_cumprod[-1] == 0.0:
            raise ValueError("objective: zero terminal SNR needs prediction 'v', got 'epsilon'")
        self.schedule, self.prediction, self._drawn = schedule, prediction, noise or Noise()
        self._signal = _table(np.sqrt(schedule.alphas_cumprod), device)
        self._noise = _table(np.sqrt(1.0 - schedule.alphas_cumprod), device)
        self.kind, weighting = kind or Mse(), weighting or NoWeighting()
        self._sampling, self._span = sampling or Uniform(), span
        self._draw = self._sampling.on(device)
        self._sigma = _table(schedule.sigmas, device)
        weights = None if weighting.uniform else weighting.of_snr(schedule.snr, prediction)
        self._weight = None if weights is None else _table(weights, device)

    def timesteps(self, rng: Rng, shape: Sequence[int] = ()) -> Tensor:
        """Returns (B,) int64, whatever the latents' shape: a level in (0, 1) is a position in the span."""
        first, end = (edge * self.schedule.steps // 1000 for edge in self._span)
        count = end - first
        if self._sampling.even:
            drawn = rng.randint(Stream.TIMESTEPS, count)
        elif self._sampling.exact:
            return Tensor(rng.xp.rint(self._draw(rng) * np.float32(self.schedule.steps)).astype(np.int64))
        else:
            drawn = (self._draw(rng) * np.float32(count)).astype(np.int64).clip(0, count - 1)
        return Tensor(drawn + first if first else drawn)

    def at_levels(self, levels: Tensor) -> Tensor:
        """Returns (B,) int64, the timesteps of noise levels in (0, 1): the whole schedule, whatever the span."""
        return Tensor((levels.data * np.float32(self.schedule.steps)).astype(np.int64).clip(0, self.schedule.steps - 1))

    def levels(self, t: Tensor) -> Tensor:
        """Returns (B,) fp32, the noise levels of timesteps."""
        return Tensor(t.data.astype(np.float32) / np.float32(self.schedule.steps))

    def noise(self, rng: Rng, latents: Tensor) -> Tensor:
        """Returns (B, H, W, C) fp32, the noise of the target."""
        return self._drawn.drawn(rng, latents)

    def mixed(self, rng: Rng, noise: Tensor) -> Tensor:
        """Returns the noise that is mixed into the latents; with input perturbation it differs from the target's."""
        return self._drawn.mixed(rng, noise)

    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns x_t, computed in fp32 and given in the latents' dtype."""
        x: Tensor = _at(self._signal, t, latents) * latents + _at(self._noise, t, latents) * noise
        return x.to(latents.dtype)

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the target of the prediction, fp32."""
        if self.prediction == "epsilon":
            return noise.float()
        return _at(self._signal, t, latents) * noise - _at(self._noise, t, latents) * latents

    def noise_level(self, t: Tensor) -> NoiseLevel:
        return NoiseLevel(lambda: t.float() * (1.0 / self.schedule.steps), lambda: F.embedding(t, self._sigma))

    def weight(self, t: Tensor) -> Tensor | None:
        return None if self._weight is None else F.embedding(t, self._weight)


def _table(values: np.ndarray[Any, Any], device: str) -> Tensor:
    return Tensor(get_backend(device).to_device(values.astype(np.float32)))


def _at(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Returns the table at each sample's timestep, shaped to multiply `like`."""
    values: Tensor = F.embedding(t, table)
    return values.reshape(t.shape[0], *([1] * (like.ndim - 1)))
