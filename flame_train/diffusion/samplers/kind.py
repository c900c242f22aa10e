"""The interface of a sampler, and of the way that it follows from noise to image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from flame_train.engine import Tensor
from flame_train.settings import Entry

Denoise = Callable[[Tensor, Tensor, Any], Tensor]
"""(x, times (B,), conditioning) to the model's prediction."""

NoiseSampler = Callable[[int], Tensor]
"""Standard normal noise of the latents' shape for the step of this number, always the same for one image."""


class Path(Protocol):
    """The way from noise to image: noise levels, and how x changes with the level. Latents are (B, H, W, C)."""

    @property
    def levels(self) -> tuple[float, ...]:
        """The noise levels of the steps, falling, and 0 at the end."""

    def begin(self, noise: Tensor) -> Tensor:
        """x at the first level, fp32, from standard normal noise."""

    def slope(self, denoise: Denoise, x: Tensor, i: int, cond: Any) -> Tensor:
        """dx / dlevel, fp32, at level i: it asks the model. The model's image is x - level * slope."""


class Sampler(Entry):
    """One way of taking the steps: its fields are keys of `[sample]`."""

    flow: ClassVar[bool] = False
    """Whether it serves models of rectified flow."""

    calls: ClassVar[int] = 1
    """How often a step asks the model; the last one asks once."""

    usual_name: ClassVar[str]
    """Its name in AUTOMATIC1111's web interface and its descendants."""

    @abstractmethod
    def sample(self, denoise: Denoise, noise: Tensor, cond: Any, path: Any, noise_sampler: NoiseSampler) -> Tensor:
        """Latents of an image.

        Args:
            denoise: gives the model's prediction.
            noise: standard normal (B, H, W, C).
            cond: the conditioning, passed to `denoise`.
            path: the `Path` to follow.
            noise_sampler: noise for samplers that add some in each step.

        Returns:
            Latents (B, H, W, C), fp32.
        """
