"""Classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

from typing import Any

from ..engine import Tensor
from ..engine import functional as F
from .samplers.kind import Denoise


def guided(denoise: Denoise, guidance: float) -> Denoise:
    """A denoiser whose `cond` is of twice as many samples as x has.

    The first half is the prompt, the second the negative prompt; both go through `denoise` as one batch. With a
    guidance of 1 there is no second half.
    """
    if guidance == 1.0:
        return denoise

    def both(x: Tensor, t: Tensor, cond: Any) -> Tensor:
        wanted, unwanted = F.chunk(denoise(F.cat([x, x]), F.cat([t, t]), cond), 2)
        return unwanted + (wanted - unwanted) * guidance

    return both
