"""Normalisation of groups of channels. Statistics are taken in fp32 or fp64, whatever the input's dtype."""

from __future__ import annotations

import math

from ....errors import ShapeError
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, Op, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common import conditions
from ..common.dims import Shape, at_least, sum_to_channels
from ..pointwise.activations import silu
from ..shape.concat import cat
from . import group_norm_planes
from .group_norm_launch import Given, Saved, forward, gradients
from .group_norm_planes import no_group_planes


@primitive(torch="nn.functional.group_norm", aux=("mean", "rstd"))
def group_norm(
    xp: Namespace,
    input: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    layout: str = "NCHW",
) -> tuple[Array, Array, Array]:
    """Each group of channels normalised over itself and space, then scaled per channel (arXiv 1803.08494)

    Args:
        input: (B, C, ...) in NCHW, (B, ..., C) in NHWC.
        num_groups: groups of channels.
        weight, bias: (C,), or None.

    Returns:
        In input's shape, and the groups' means and reciprocal deviations.
    """
    grouped, axes = _grouped(input, num_groups, layout)
    mean = xp.mean(grouped, axis=axes, keepdims=True)
    centred = grouped - mean
    rstd = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = (centred * rstd).reshape(input.shape)
    return affine("group_norm", y, weight, bias, layout), mean, rstd


def _grouped(x: Array, groups: int, layout: str) -> tuple[Array, tuple[int, ...]]:
    """Returns x with its channels split into groups, and the axes over which a group spreads."""
    if groups < 1:
        raise ShapeError(f"group_norm: expected at least one group, got {groups}")
    at_least(2, x.shape, "group_norm")
    channels = x.shape[-1 if layout == "NHWC" else 1]
    if channels % groups:
        raise ShapeError(f"group_norm: {channels} channels do not divide into {groups} groups")
    if layout == "NHWC":
        return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), groups, channels // groups), (1, 3)
    return x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups), (2,)


def per_channel(what: str, w: Array, shape: Shape, layout: str) -> Array:
    """Returns `w` (C,) reshaped to broadcast over an input of `shape`.

    Raises ShapeError, which names it by `what`, unless there is a value a channel.
    """
    at_least(2, shape, what)
    channels = shape[-1 if layout == "NHWC" else 1]
    if w.shape != (channels,):
        raise ShapeError(
            f"{what}: expected {channels} values, one a channel of {tuple(shape)} ({layout}), got {tuple(w.shape)}"
        )
    return w if layout == "NHWC" else w.reshape(1, -1, *([1] * (len(shape) - 2)))


def affine(op: str, x: Array, weight: Array | None, bias: Array | None, layout: str) -> Array:
    """x * weight + bias, a value (C,) of each for a channel.

    Args:
        x: (B, C, ...) in NCHW, (B, ..., C) in NHWC.
        weight, bias: (C,), or None.

    Returns:
        In the shape of `x`.
    """
    if weight is not None:
        x = x * per_channel(f"{op}: weight", weight, x.shape, layout)
    return x if bias is None else x + per_channel(f"{op}: bias", bias, x.shape, layout)


@group_norm.vjp("input")
def _(
    xp: Namespace,
    g: Array,
    input: Array,
    num_groups: int,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    layout: str,
) -> Array:
    gw = affine("group_norm", g, weight, None, layout)
    grouped, axes = _grouped(input, num_groups, layout)
    gw, _ = _grouped(gw, num_groups, layout)
    xhat = (grouped - mean) * rstd
    slope = xp.mean(gw * xhat, axis=axes, keepdims=True)
    return (rstd * (gw - xp.mean(gw, axis=axes, keepdims=True) - xhat * slope)).reshape(input.shape)


@group_norm.vjp("weight")
def _(xp: Namespace, g: Array, input: Array, num_groups: int, mean: Array, rstd: Array, layout: str) -> Array:
    grouped, _ = _grouped(input, num_groups, layout)
    return sum_to_channels(xp, g * ((grouped - mean) * rstd).reshape(input.shape), layout)


group_norm.vjp("bias")(sum_to_channels)


group_norm.samples(
    sample((2, 6, 3, 2), 3, (6,), (6,)),
    sample((2, 4, 5), 2),
    sample((2, 3, 2, 6), 2, (6,), (6,), 1e-3, layout="NHWC"),
    sample((1, 5, 4), 4, (4,), None, layout="NHWC"),
)
group_norm.errors(
    ErrorSample(sample((1, 6, 2, 2), 4), ShapeError, "6 channels do not divide into 4 groups"),
    ErrorSample(sample((1, 6, 2, 2), 0), ShapeError, "at least one group, got 0"),
    ErrorSample(sample((6,), 2), ShapeError, "group_norm: expected a tensor of at least 2 dims"),
    ErrorSample(sample((1, 6, 2, 2), 2, (1,)), ShapeError, "expected 6 values, one a channel .*, got .1,"),
)


@composite(aux=("mean", "rstd"))
def group_norm_silu(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    layout: str = "NCHW",
) -> Tensor:
    """silu(group_norm(input)): the opening of every residual block of a diffusion UNet

    Args:
        input, num_groups, weight, bias, eps, layout: as in `group_norm`.

    Returns:
        In input's shape.
    """
    return silu(group_norm(input, num_groups, weight, bias, eps, layout))


group_norm_silu.errors(ErrorSample(sample((1, 6, 2, 2), 4), ShapeError, "6 channels do not divide into 4 groups"))
group_norm_silu.samples(sample((2, 6, 3, 2), 3, (6,), (6,)), sample((2, 3, 2, 6), 2, (6,), (6,), 1e-3, layout="NHWC"))


@composite(aux=("mean", "rstd"))
def cat_group_norm_silu(
    input: Tensor,
    other: Tensor | None,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """group_norm_silu([input, other] + shift), channels last: both openings in a UNet's residual block, nothing copied

    other (..., C2) stands behind the channels of input (..., C1): what comes past lower resolutions. shift
    (B, C1 + C2) is added to all pixels of an image: a time embedding.

    Args:
        input: (B, ..., C1).
        other: (B, ..., C2), or None.
        num_groups: groups of the C1 + C2 channels.
        weight, bias: (C1 + C2,).
        shift: (B, C1 + C2), or None.

    Returns:
        (B, ..., C1 + C2).

    Raises:
        ShapeError: shapes do not fit.
    """
    x = input if other is None else cat([input, other], -1)
    at_least(2, x.shape, "cat_group_norm_silu")
    if shift is not None:
        batch, channels = x.shape[0], x.shape[-1]
        if shift.shape != (batch, channels):
            raise ShapeError(f"cat_group_norm_silu: expected a shift of shape {(batch, channels)}, got {shift.shape}")
        x = x + shift.reshape(batch, *[1] * (x.ndim - 2), channels)
    made: Tensor = group_norm_silu(x, num_groups, weight, bias, eps, "NHWC")
    return made


cat_group_norm_silu.samples(
    sample((2, 3, 2, 4), (2, 3, 2, 2), 3, (6,), (6,), (2, 6)),
    sample((2, 3, 2, 6), None, 2, (6,), (6,), (2, 6), 1e-3),
    sample((1, 5, 4), (1, 5, 2), 2, (6,), (6,)),
)
cat_group_norm_silu.errors(
    ErrorSample(sample((1, 2, 2, 4), (1, 2, 2, 2), 4, (6,), (6,)), ShapeError, "6 channels do not divide"),
    ErrorSample(sample((1, 2, 2, 4), (1, 2, 3, 4), 2, (8,), (8,)), ShapeError, "must be equal but for dim -1"),
    ErrorSample(sample((4,), None, 2, (4,), (4,), (4,)), ShapeError, "at least 2 dims"),
    ErrorSample(sample((2, 2, 4), None, 2, (4,), (4,), (4,)), ShapeError, r"shape \(2, 4\), got \(4,\)"),
)


# ---- our kernels (group_norm.cu) -----------------------------------------------------------------------------


def _group_condition(input: Array, num_groups: int, weight: Array | None, bias: Array | None, layout: str) -> str:
    if layout != "NHWC" or weight is None or bias is None:
        return "only channels-last with weight and bias"
    return _cut_condition(input, input.shape[-1:], num_groups, weight, bias)


def _joined_condition(
    input: Array, other: Array | None, num_groups: int, weight: Array, bias: Array, shift: Array | None
) -> str:
    if input.ndim < 2:
        return "no channels of pixels"
    channels = input.shape[-1]
    if other is not None:
        if other.shape[:-1] != input.shape[:-1] or channels % 8 or other.shape[-1] % 8:
            return "arguments that do not meet, or not by eights"
        channels += other.shape[-1]
    if shift is not None and shift.shape != (input.shape[0], channels):
        return "a shift that is refused"
    uneven = conditions.same(conditions.AT_MOST_FP32, input, other, shift)
    return uneven or _cut_condition(input, (channels,), num_groups, weight, bias)


def _cut_condition(input: Array, channels: Shape, num_groups: int, weight: Array, bias: Array) -> str:
    if num_groups < 1 or channels[0] % num_groups or input.size == 0:
        return "channels do not divide into groups, or there are none"
    if not weight.shape == bias.shape == channels:
        return "weights that are refused"
    if int(input.device.compute_capability) < 80:
        return "asynchronous copies need compute capability 8.0"
    return conditions.same(conditions.AT_MOST_FP32, input, weight, bias) or conditions.packets(channels[0], 3072)


def _launched(op: Op, silu: bool) -> None:
    """Declares group_norm.cu's kernels for an op of one input."""

    @op.cuda("ops/norm/group_norm.cu", when=_group_condition)
    def _(
        k: Launcher, input: Array, num_groups: int, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        return forward(k, Given(input), num_groups, weight, bias, eps, silu)

    @op.cuda_vjp("ops/norm/group_norm.cu", "input", "weight", "bias", when=_group_condition)
    def _(
        k: Launcher, g: Array, input: Array, weight: Array, bias: Array, mean: Array, rstd: Array, targets: GradTargets
    ) -> tuple[Array | None, ...]:
        saved = Saved(Given(input), weight, bias, mean, rstd, silu)
        made = gradients(k, g, saved, targets)
        return made.get("input"), made.get("weight"), made.get("bias")


@group_norm.cuda("planes", when=no_group_planes)
def _(
    k: Launcher, input: Array, num_groups: int, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    return group_norm_planes.forward(k, input, num_groups, weight, bias, eps)


@group_norm.cuda_vjp("planes", "input", "weight", "bias", when=no_group_planes)
def _(
    k: Launcher, g: Array, input: Array, weight: Array | None, mean: Array, rstd: Array, needs: frozenset[str]
) -> tuple[Array | None, ...]:
    return group_norm_planes.gradients(k, g, input, weight, mean, rstd, needs)


_launched(group_norm, False)
_launched(group_norm_silu, True)


@cat_group_norm_silu.cuda("ops/norm/group_norm.cu", when=_joined_condition)
def _(
    k: Launcher,
    input: Array,
    other: Array | None,
    num_groups: int,
    weight: Array,
    bias: Array,
    shift: Array | None,
    eps: float,
) -> tuple[Array, Array, Array]:
    return forward(k, Given(input, other, shift), num_groups, weight, bias, eps, True)


@cat_group_norm_silu.cuda_vjp("ops/norm/group_norm.cu", "input", "other", "weight", "bias", when=_joined_condition)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    other: Array | None,
    weight: Array,
    bias: Array,
    shift: Array | None,
    mean: Array,
    rstd: Array,
    targets: GradTargets,
) -> tuple[Array | None, ...]:
    saved = Saved(Given(input, other, shift), weight, bias, mean, rstd, True)
    made = gradients(k, g, saved, targets)
    return tuple(made.get(name) for name in ("input", "other", "weight", "bias"))


cat_group_norm_silu.perf_samples(
    sample((2, 32, 32, 640), (2, 32, 32, 320), 32, (960,), (960,)),
    sample((3, 17, 9, 320), None, 32, (320,), (320,), (3, 320)),
    sample((1, 16, 16, 1280), (1, 16, 16, 640), 32, (1920,), (1920,), (1, 1920), 1e-6),
)


for _norm in (group_norm, group_norm_silu):
    _norm.perf_samples(
        sample((2, 32, 32, 320), 32, (320,), (320,), layout="NHWC"),
        sample((1, 17, 9, 1920), 32, (1920,), (1920,), 1e-6, layout="NHWC"),
        sample((3, 5, 7, 2560), 32, (2560,), (2560,), layout="NHWC"),
        sample((2, 6, 33, 40), 3, (6,), (6,)),
    )
