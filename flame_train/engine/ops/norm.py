"""Normalisation. Statistics are taken in fp32 or fp64, whatever the input's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..tensor import Tensor
from .elementwise import silu


@primitive(torch="nn.functional.layer_norm", aux=("mean", "rstd"))
def layer_norm(
    xp: Any, input: Array, normalized_shape: Sequence[int], weight: Array | None = None, bias: Array | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(input - mean) / sqrt(var + eps) * weight + bias over the last dims (arXiv 1607.06450)"""
    n = len(normalized_shape)
    if tuple(input.shape[-n:]) != tuple(normalized_shape):
        raise ShapeError(
            f"layer_norm: expected input ending in {tuple(normalized_shape)}, got {tuple(input.shape)}"
        )
    axes = tuple(range(-n, 0))
    mean = xp.mean(input, axis=axes, keepdims=True)
    centred = input - mean
    rstd = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias), mean, rstd


@layer_norm.vjp("input")
def _(
    xp: Any,
    g: Array,
    input: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    normalized_shape: Sequence[int],
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    xhat = (input - mean) * rstd
    gw = g if weight is None else g * weight
    slope = xp.mean(gw * xhat, axis=axes, keepdims=True)
    return rstd * (gw - xp.mean(gw, axis=axes, keepdims=True) - xhat * slope)


@layer_norm.vjp("weight")
def _(xp: Any, g: Array, input: Array, mean: Array, rstd: Array) -> Array:
    return g * (input - mean) * rstd


@layer_norm.vjp("bias")
def _(xp: Any, g: Array) -> Array:
    return g


@layer_norm.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8), (8,), (8,), (8,))
    yield sample((3, 5), (5,), None, None, 1e-2)
    yield sample((2, 3, 4), (3, 4), (3, 4), None)


@layer_norm.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (4,)), ShapeError, r"ending in \(4,\), got \(2, 3\)")


@primitive(torch="nn.functional.group_norm", aux=("mean", "rstd"))
def group_norm(
    xp: Any, input: Array, num_groups: int, weight: Array | None = None, bias: Array | None = None,
    eps: float = 1e-5, layout: str = "NCHW",
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Each group of channels normalised over itself and space, then scaled per channel (arXiv 1803.08494)"""
    grouped, axes = _grouped(input, num_groups, layout)
    mean = xp.mean(grouped, axis=axes, keepdims=True)
    centred = grouped - mean
    rstd = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = (centred * rstd).reshape(input.shape)
    if weight is not None:
        y = y * _per_channel(weight, input.ndim, layout)
    return (y if bias is None else y + _per_channel(bias, input.ndim, layout)), mean, rstd


def _grouped(x: Array, groups: int, layout: str) -> tuple[Array, tuple[int, ...]]:
    """x with its channels split into groups, and the axes over which a group spreads."""
    if layout == "NHWC":
        if x.shape[-1] % groups:
            raise ShapeError(f"group_norm: {x.shape[-1]} channels do not divide into {groups} groups")
        return x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups), (1, 3)
    if x.shape[1] % groups:
        raise ShapeError(f"group_norm: {x.shape[1]} channels do not divide into {groups} groups")
    return x.reshape(x.shape[0], groups, -1), (2,)


def _per_channel(w: Array, ndim: int, layout: str) -> Array:
    return w if layout == "NHWC" else w.reshape(1, -1, *([1] * (ndim - 2)))


@group_norm.vjp("input")
def _(
    xp: Any,
    g: Array,
    input: Array,
    num_groups: int,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    layout: str,
) -> Array:
    gw = g if weight is None else g * _per_channel(weight, input.ndim, layout)
    grouped, axes = _grouped(input, num_groups, layout)
    gw, _ = _grouped(gw, num_groups, layout)
    xhat = (grouped - mean) * rstd
    slope = xp.mean(gw * xhat, axis=axes, keepdims=True)
    return (rstd * (gw - xp.mean(gw, axis=axes, keepdims=True) - xhat * slope)).reshape(input.shape)


@group_norm.vjp("weight")
def _(xp: Any, g: Array, input: Array, num_groups: int, mean: Array, rstd: Array, layout: str) -> Array:
    grouped, _ = _grouped(input, num_groups, layout)
    return _to_channels(xp, g * ((grouped - mean) * rstd).reshape(input.shape), layout)


@group_norm.vjp("bias")
def _(xp: Any, g: Array, layout: str) -> Array:
    return _to_channels(xp, g, layout)


def _to_channels(xp: Any, x: Array, layout: str) -> Array:
    """The sum over everything but the channels."""
    channel = x.ndim - 1 if layout == "NHWC" else 1
    return xp.sum(x, axis=tuple(i for i in range(x.ndim) if i != channel))


@group_norm.samples
def _() -> Iterator[Sample]:
    yield sample((2, 6, 3, 2), 3, (6,), (6,))
    yield sample((2, 4, 5), 2)
    yield sample((2, 3, 2, 6), 2, (6,), (6,), 1e-3, layout="NHWC")
    yield sample((1, 5, 4), 4, (4,), None, layout="NHWC")


@group_norm.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((1, 6, 2, 2), 4), ShapeError, "6 channels do not divide into 4 groups")


@composite(aux=("mean", "rstd"))
def group_norm_silu(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    layout: str = "NCHW",
) -> Tensor:  # fmt: skip
    """silu(group_norm(input)): the opening of every residual block of a diffusion UNet"""
    return silu(group_norm(input, num_groups, weight, bias, eps, layout))  # type: ignore[no-any-return]


@group_norm_silu.samples
def _() -> Iterator[Sample]:
    yield sample((2, 6, 3, 2), 3, (6,), (6,))
    yield sample((2, 3, 2, 6), 2, (6,), (6,), 1e-3, layout="NHWC")
