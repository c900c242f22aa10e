"""Classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

from typing import Any

from ..engine import Tensor
from ..engine import functional as F
from .samplers.kind import Denoise


def guided(denoise: Denoise, guidance: float, square: int = 0) -> Denoise:
    """A denoiser whose `cond` is of twice as many samples as x has.

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
    """The length of each square's values as a vector, (B, H / square, W / square)."""
    B, H, W, C = x_BHWC.shape
    squares = x_BHWC.reshape(B, H // square, square, W // square, square, C)
    return (squares * squares).sum(dim=(2, 4, 5)).sqrt()


def _of_squares(each_Bhw: Tensor, square: int) -> Tensor:
    """A number of each square for its pixels, (B, H, W, 1)."""
    B, h, w = each_Bhw.shape
    return each_Bhw.reshape(B, h, 1, w, 1, 1).expand(B, h, square, w, square, 1).reshape(B, h * square, w * square, 1)
