"""Samplers that a config can choose: each is one file of this folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.settings import Entry, Table, entries_in

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
        """Returns x at the first level, fp32, from standard normal noise."""

    def slope(self, denoise: Denoise, x: Tensor, i: int, cond: Any) -> Tensor:
        """Returns dx / dlevel, fp32, at level i: it asks the model. The model's image is x - level * slope."""


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
        """Returns latents of an image, (B, H, W, C) fp32.

        Args:
            denoise: gives the model's prediction.
            noise: standard normal (B, H, W, C).
            cond: the conditioning, passed to `denoise`.
            path: the `Path` to follow.
            noise_sampler: noise for samplers that add some in each step.
        """


def guided(denoise: Denoise, guidance: float, square: int = 0) -> Denoise:
    """Returns a denoiser whose `cond` is of twice as many samples as x has.

    The first half is the prompt, the second the negative prompt; both go through `denoise` as one batch. With a
    guidance of 1 there is no second half. With `square` each square of so many latent pixels a side keeps the length of
    the prompt's prediction. Qwen-Image 1's pipeline has it (arXiv 2508.02324).
    """
    if guidance == 1.0:
        return denoise

    def both(x: Tensor, t: Tensor, cond: Any) -> Tensor:
        wanted, unwanted = F.chunk(denoise(F.cat([x, x]), F.cat([t, t]), cond), 2)
        made = unwanted + (wanted - unwanted) * guidance
        return made * _of_squares(_lengths(wanted, square) / _lengths(made, square), square) if square else made

    return both


def _lengths(x_BHWC: Tensor, square: int) -> Tensor:
    """Returns the length of each square's values as a vector, (B, H / square, W / square)."""
    B, H, W, C = x_BHWC.shape
    squares = x_BHWC.reshape(B, H // square, square, W // square, square, C)
    return (squares * squares).sum(dim=(2, 4, 5)).sqrt()


def _of_squares(each_Bhw: Tensor, square: int) -> Tensor:
    """Returns a number of each square for its pixels, (B, H, W, 1)."""
    B, h, w = each_Bhw.shape
    return each_Bhw.reshape(B, h, 1, w, 1, 1).expand(B, h, square, w, square, 1).reshape(B, h * square, w * square, 1)


SAMPLERS: Table[Sampler] = Table(
    "sampler",
    "sampler; heun asks the model twice a step; models of flow take euler and heun",
    entries_in(__name__, Sampler),
    "euler",
    aka=("sample_sampler", "noise_scheduler"),
    free=True,
)
