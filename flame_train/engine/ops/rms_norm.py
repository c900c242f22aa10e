"""Root-mean-square normalisation, rotary positions, and the two together as transformers use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..tensor import Tensor


@primitive(torch="nn.functional.rms_norm", aux=("rstd",))
def rms_norm(
    xp: Any, input: Array, normalized_shape: Sequence[int], weight: Array | None = None, eps: float | None = None
) -> tuple[Array, Array]:
    """input / sqrt(mean(input^2) + eps) * weight over the last dims (arXiv 1910.07467)

    eps is the working precision's machine epsilon if not given: fp32's for all narrower floats.
    """
    n = len(normalized_shape)
    if n == 0 or tuple(input.shape[-n:]) != tuple(normalized_shape):
        raise ShapeError(f"rms_norm: expected input ending in {tuple(normalized_shape)}, got {tuple(input.shape)}")
    axes = tuple(range(-n, 0))
    small = eps if eps is not None else float(np.finfo(input.dtype).eps)
    rstd = 1.0 / xp.sqrt(xp.mean(input * input, axis=axes, keepdims=True) + small)
    y = input * rstd
    return (y if weight is None else y * weight), rstd


@rms_norm.vjp("input")
def _(xp: Any, g: Array, input: Array, weight: Array | None, rstd: Array, normalized_shape: Sequence[int]) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    gw, xhat = g if weight is None else g * weight, input * rstd
    return rstd * (gw - xhat * xp.mean(gw * xhat, axis=axes, keepdims=True))


@rms_norm.vjp("weight")
def _(xp: Any, g: Array, input: Array, rstd: Array) -> Array:
    return g * input * rstd


@rms_norm.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8), (8,), (8,), 1e-6)
    yield sample((3, 5), (5,))
    yield sample((2, 3, 4), (3, 4), (3, 4), 1e-2)


@rms_norm.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (4,)), ShapeError, r"ending in \(4,\), got \(2, 3\)")


@primitive()
def rope(xp: Any, input: Array, cos: Array, sin: Array, interleaved: bool = True) -> Array:
    """input * cos + turned(input) * sin along the last dim: pairs of numbers turned by an angle (arXiv 2104.09864)

    A pair is two neighbours (Flux), or with interleaved=False two elements half the dim apart (LLaMA). cos and sin
    have an entry for each element, in an order of the same kind, and broadcast over the other dims.
    """
    return input * cos + _turned(xp, _even(input), interleaved) * sin


def _even(x: Array) -> Array:
    if x.shape[-1] % 2:
        raise ShapeError(f"rope: expected an even last dim, got {tuple(x.shape)}")
    return x


def _turned(xp: Any, x: Array, interleaved: bool) -> Array:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        return xp.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    half = x.shape[-1] // 2
    return xp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


@rope.vjp("input")
def _(xp: Any, g: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    return g * cos - _turned(xp, g * sin, interleaved)


@rope.vjp("cos")
def _(xp: Any, g: Array, input: Array) -> Array:
    return g * input


@rope.vjp("sin")
def _(xp: Any, g: Array, input: Array, interleaved: bool) -> Array:
    return g * _turned(xp, input, interleaved)


@rope.samples
def _() -> Iterator[Sample]:
    yield sample((2, 2, 3, 4), (3, 4), (3, 4))
    yield sample((2, 3, 6), (3, 6), (3, 6), False)


@rope.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (3,), (3,)), ShapeError, "rope: expected an even last dim")


@composite()
def rms_norm_rope(
    input: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6, interleaved: bool = True
) -> Tensor:
    """rope(rms_norm(input) over the last dim): queries and keys of a transformer that normalises them"""
    normed: Tensor = rms_norm(input, (input.shape[-1],), weight, eps)
    return rope(normed, cos, sin, interleaved)


@rms_norm_rope.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), None, (3,), (3,)), ShapeError, "rope: expected an even last dim")


@rms_norm_rope.samples
def _() -> Iterator[Sample]:
    yield sample((2, 2, 3, 4), (4,), (3, 4), (3, 4))
    yield sample((2, 3, 6), None, (3, 6), (3, 6), 1e-3, False)
