"""Normalisation of each channel over the batch, with running statistics."""

from __future__ import annotations

import math
from typing import Any

from ...errors import ShapeError
from ..autograd.versions import VERSIONS
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, compute_dtype, float32, promote
from ..mode import mode
from ..namespace import Namespace
from ..op import ErrorSample, composite, primitive, sample
from ..op_samples import positive
from ..ops.common.channel_stats import folded, no_planes, slopes, statistics
from ..ops.common.conditions import floating
from ..ops.common.dims import Shape, at_least
from ..ops.norm.group_norm import affine, per_channel
from ..sums import accurate_sum
from ..tensors.tensor import Tensor

Moments = tuple[Array, Array]
"""Mean and variance, not the unbiased one, of each channel, fp32 or fp64."""


@primitive(aux=("mean", "rstd"))
def batch_norm_train(
    xp: Namespace,
    input: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    layout: str = "NCHW",
    known: Moments | None = None,
) -> tuple[Array, Array, Array]:
    """(input - mean) / sqrt(var + eps) * weight + bias per channel, over everything else (arXiv 1502.03167)

    Args:
        input, weight, bias, eps, layout: as in `batch_norm`.
        known: the mean and the variance of each channel, if they were computed before; gradients are as without.

    Returns:
        The result, and the mean and the reciprocal deviation of each channel.
    """
    mean, var = _moments_of(xp, input, other_dims(input.shape, layout)) if known is None else known
    kept = _kept(input.shape, layout)
    mean, rstd = mean.reshape(kept), 1.0 / xp.sqrt(var.reshape(kept) + eps)
    return affine("batch_norm", (input - mean) * rstd, weight, bias, layout), mean, rstd


def _moments_of(xp: Namespace, x: Array, axes: tuple[int, ...]) -> Moments:
    """Mean and variance over `axes`."""
    mean = accurate_sum(xp.mean, x, axes, True)
    centred = x - mean
    return mean, accurate_sum(xp.mean, centred * centred, axes, True)


def _kept(shape: Shape, layout: str) -> Shape:
    """Returns the shape of a channel's numbers, which broadcasts over `shape`."""
    others = other_dims(shape, layout)
    return tuple(1 if i in others else n for i, n in enumerate(shape))


def other_dims(shape: Shape, layout: str) -> tuple[int, ...]:
    """Returns all dims but that of the channels. Raises ShapeError if there are fewer than two."""
    at_least(2, shape, "batch_norm")
    channel = len(shape) - 1 if layout == "NHWC" else 1
    return tuple(i for i in range(len(shape)) if i != channel)


@batch_norm_train.vjp("input")
def _(xp: Namespace, g: Array, input: Array, weight: Array | None, mean: Array, rstd: Array, layout: str) -> Array:
    axes = other_dims(input.shape, layout)
    gw, xhat = affine("batch_norm", g, weight, None, layout), (input - mean) * rstd
    slope = accurate_sum(xp.mean, gw * xhat, axes, True)
    return rstd * (gw - accurate_sum(xp.mean, gw, axes, True) - xhat * slope)


@batch_norm_train.vjp("weight")
def _(xp: Namespace, g: Array, input: Array, mean: Array, rstd: Array, layout: str) -> Array:
    return accurate_sum(xp.sum, g * (input - mean) * rstd, other_dims(input.shape, layout))


@primitive()
def batch_norm_inference(
    xp: Namespace,
    input: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    layout: str = "NCHW",
) -> Array:
    """(input - running_mean) / sqrt(running_var + eps) * weight + bias per channel

    Args:
        input, running_mean, running_var, weight, bias, eps, layout: as in `batch_norm`.

    Returns:
        In input's shape.
    """
    mean, var = _running(running_mean, running_var, input.shape, layout)
    return affine("batch_norm", (input - mean) / xp.sqrt(var + eps), weight, bias, layout)


batch_norm_inference.non_differentiable("running_mean", "running_var")


def _running(mean: Array, var: Array, shape: Shape, layout: str) -> tuple[Array, Array]:
    """Running statistics that broadcast over an input of `shape`."""
    return (
        per_channel("batch_norm: running_mean", mean, shape, layout),
        per_channel("batch_norm: running_var", var, shape, layout),
    )


@batch_norm_inference.vjp("input")
def _(xp: Namespace, g: Array, running_var: Array, weight: Array | None, eps: float, layout: str) -> Array:
    var = per_channel("batch_norm: running_var", running_var, g.shape, layout)
    return affine("batch_norm", g, weight, None, layout) / xp.sqrt(var + eps)


@batch_norm_inference.vjp("weight")
def _(xp: Namespace, g: Array, input: Array, running_mean: Array, running_var: Array, eps: float, layout: str) -> Array:
    mean, var = _running(running_mean, running_var, input.shape, layout)
    return accurate_sum(xp.sum, g * (input - mean) / xp.sqrt(var + eps), other_dims(input.shape, layout))


for _op in (batch_norm_train, batch_norm_inference):
    _op.vjp("bias")(lambda xp, g, layout: accurate_sum(xp.sum, g, other_dims(g.shape, layout)))

batch_norm_train.samples(
    sample((3, 2, 2, 3), (2,), (2,)), sample((4, 3)), sample((2, 3, 2, 4), (4,), (4,), 1e-3, "NHWC")
)

batch_norm_inference.errors(
    ErrorSample(sample((4, 3), (2,), positive(2)), ShapeError, r"expected 3 values, .*, got \(2,\)"),
    ErrorSample(sample((), (2,), positive(2)), ShapeError, "at least 2 dims"),
)

batch_norm_inference.samples(
    sample((3, 2, 2, 3), (2,), positive(2), (2,), (2,)),
    sample((4, 3), (3,), positive(3)),
    sample((2, 3, 2, 4), (4,), positive(4), (4,), (4,), 1e-3, "NHWC"),
)

batch_norm_train.errors(ErrorSample(sample((4,)), ShapeError, r"at least 2 dims, got one of shape \(4,\)"))


@composite(torch="nn.functional.batch_norm", mutates=("running_mean", "running_var"))
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    layout: str = "NCHW",
) -> Tensor:
    """(input - mean) / sqrt(var + eps) * weight + bias per channel, with the batch's statistics or the running ones

    With training, the running statistics move towards the batch's in place, by `momentum`, the variance by its
    unbiased estimate. Not while a checkpoint recomputes, which would count a batch twice.

    Args:
        input: (B, C, ...) in NCHW, (B, ..., C) in NHWC.
        running_mean, running_var: (C,), or None; written in training.
        weight, bias: (C,), or None.
        training: whether the batch's own statistics are used.
        momentum: the new statistics' share in the running ones.
        eps: is added to a variance, or to a mean square.
        layout: "NCHW" or "NHWC".

    Returns:
        In input's shape.
    """
    if not training:
        return batch_norm_inference(
            input, *running_statistics("batch_norm", running_mean, running_var), weight, bias, eps, layout
        )
    axes = other_dims(input.shape, layout)
    known = track_statistics("batch_norm", input, axes, layout, running_mean, running_var, momentum)
    return batch_norm_train(input, weight, bias, eps, layout, known)


def running_statistics(op: str, mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the running statistics. Raises ValueError if one is missing."""
    if mean is None or var is None:
        raise ValueError(f"{op}: expected running_mean and running_var where the input's statistics are not used")
    return mean, var


def track_statistics(
    op: str,
    input: Tensor,
    axes: tuple[int, ...],
    layout: str,
    mean: Tensor | None,
    var: Tensor | None,
    momentum: float,
) -> Moments | None:
    """Moves running statistics towards those of input over `axes`; where images remain, to the mean of these.

    Raises ShapeError for a single value per channel, which has no unbiased variance.

    Args:
        op: the name in messages.
        input: the activations.
        axes: the axes that are averaged over.
        layout: "NCHW" or "NHWC".
        mean, var: running statistics (C,), or None.
        momentum: the new statistics' share.

    Returns:
        The input's statistics; None if nobody wants them.

    Raises:
        ShapeError: a single value per channel.
    """
    count = math.prod(input.shape[a] for a in axes)
    if count < 2:
        raise ShapeError(f"{op}: expected more than one value per channel when training, got {input.shape}")
    for name, running in (("running_mean", mean), ("running_var", var)):
        if running is not None:
            per_channel(f"{op}: {name}", running.data, input.shape, layout)
    if mode().recomputing or not input.size or (mean is None and var is None):
        return None
    found = _moments(input, axes)
    for running, now, factor in zip((mean, var), found, (1.0, count / (count - 1.0)), strict=True):
        if running is not None:
            now = now.reshape(-1, running.size)
            _move(running, now[0] if len(now) == 1 else now.mean(axis=0), momentum, momentum * factor)
            VERSIONS.mark_written(running.data)
    return found


def _move(running: Tensor, now: Array, momentum: float, share: float) -> None:
    """running = running * (1 - momentum) + now * share, in place."""
    k, values = running.backend.kernels, running.data
    if k is not None and not floating(values, now):
        operands = {"running": values, "now": now, "kept": 1.0 - momentum, "share": share}
        k.elementwise(("running * kept + now * share",), operands, (values.dtype,), values.shape, (values,))
        return
    values[...] = (values * (1.0 - momentum) + now * share).astype(values.dtype)


def _moments(input: Tensor, axes: tuple[int, ...]) -> Moments:
    """Mean and variance over `axes`."""
    k, shape = input.backend.kernels, folded(input.shape, axes)
    if k is not None and shape is not None and not (floating(input.data) or no_planes(shape, input.dtype.itemsize)):
        return statistics(k, k.contiguous(input.data).reshape(shape))
    return _moments_of(input.backend.xp, input.data.astype(compute_dtype(input.dtype)), axes)


batch_norm.non_differentiable("running_mean", "running_var")

batch_norm.samples(
    sample((3, 2, 2, 3), (2,), positive(2), (2,), (2,)),
    sample((3, 2, 4), (2,), positive(2), (2,), None, True, 0.3),
    sample((4, 3), None, None, training=True),
    sample((2, 3, 2, 4), (4,), positive(4), (4,), (4,), True, layout="NHWC"),
)

batch_norm.errors(
    ErrorSample(sample((3, 2), None, None), ValueError, "expected running_mean and running_var"),
    ErrorSample(sample((1, 2), None, None, training=True), ShapeError, "more than one value per channel"),
    ErrorSample(sample((4, 3), (1,), None, training=True), ShapeError, "expected 3 values, one a channel"),
)


def _no_channels(input: Array, weight: Array | None, bias: Array | None, layout: str) -> str:
    """Says why the kernels cannot take these arguments; those that are refused are left to the reference to refuse."""
    if reason := floating(input, weight, bias):
        return reason
    if input.ndim < 2 or input.size == 0:
        return "nothing to compute with"
    shape = folded(input.shape, other_dims(input.shape, layout))
    assert shape is not None
    if any(w is not None and w.shape != shape[1:2] for w in (weight, bias)):
        return "weights that are refused"
    return no_planes(shape, input.dtype.itemsize)


def _no_running(
    input: Array, running_mean: Array, running_var: Array, weight: Array | None, bias: Array | None, layout: str
) -> str:
    reason = floating(running_mean, running_var) or _no_channels(input, weight, bias, layout)
    return reason or _no_channels(input, running_mean, running_var, layout)


def _seen(k: Launcher, x: Array, layout: str) -> Array:
    """`x` as (outer, channels, inner)."""
    return k.contiguous(x).reshape(folded(x.shape, other_dims(x.shape, layout)))


def _meeting(a: Array | None, missing: float = 1.0) -> Any:
    """Returns an array (channels,) shaped to broadcast over (outer, channels, inner); `missing` for None."""
    return missing if a is None else a.reshape(1, -1, 1)


def _applied(k: Launcher, x: Array, mean: Array, scale: Array, bias: Array | None, dtype: Any, shape: Shape) -> Array:
    operands = {"input": x, "mean": _meeting(mean), "scale": _meeting(scale), "bias": _meeting(bias, 0.0)}
    return k.elementwise(("(input - mean) * scale + bias",), operands, (dtype,), x.shape)[0].reshape(shape)


def _scale(k: Launcher, var: Array, weight: Array | None, eps: float) -> tuple[Array, Array]:
    """1 / sqrt(var + eps), and that times weight."""
    operands = {"var": var, "weight": 1.0 if weight is None else weight, "eps": eps}
    rstd, scale = k.elementwise(("1.f / sqrtf(var + eps)", "weight / sqrtf(var + eps)"), operands, (float32, float32))
    return rstd, scale


@batch_norm_train.cuda("channels", when=_no_channels)
def _(
    k: Launcher,
    input: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    layout: str,
    known: Moments | None,
) -> tuple[Array, Array, Array]:
    x, kept = _seen(k, input, layout), _kept(input.shape, layout)
    mean, var = statistics(k, x) if known is None else [a.reshape(-1) for a in known]
    rstd, scale = _scale(k, var, weight, eps)
    dtype = promote([a.dtype for a in (input, weight, bias) if a is not None])
    return _applied(k, x, mean, scale, bias, dtype, input.shape), mean.reshape(kept), rstd.reshape(kept)


@batch_norm_train.cuda_vjp("channels", "input", "weight", "bias", when=_no_channels)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    layout: str,
    needs: frozenset[str],
) -> tuple[Array | None, Array, Array]:
    x, g = _seen(k, input, layout), _seen(k, g, layout)
    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    a, b = slopes(k, g, x, mean)
    operands = {"a": a, "b": b, "rstd": rstd, "part": mean.size / x.size, "weight": 1.0 if weight is None else weight}
    values = ("a * part", "b * rstd * rstd * part", "rstd * weight", "b * rstd")
    even, tilt, slope, dw = k.elementwise(values, operands, (float32,) * 4)
    if "input" not in needs:
        return None, dw, a
    by_channel = {"mean": mean, "even": even, "tilt": tilt, "slope": slope}
    operands = {"g": g, "input": x, **{n: _meeting(v) for n, v in by_channel.items()}}
    value = "(g - even - (input - mean) * tilt) * slope"
    return k.elementwise((value,), operands, (input.dtype,), x.shape)[0].reshape(input.shape), dw, a


@batch_norm_inference.cuda("channels", when=_no_running)
def _(
    k: Launcher,
    input: Array,
    running_mean: Array,
    running_var: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    layout: str,
) -> Array:
    dtype = promote([a.dtype for a in (input, running_mean, running_var, weight, bias) if a is not None])
    _, scale = _scale(k, running_var, weight, eps)
    return _applied(k, _seen(k, input, layout), running_mean, scale, bias, dtype, input.shape)


@batch_norm_inference.cuda_vjp("channels", "input", when=_no_running)
def _(
    k: Launcher, g: Array, input_shape: Shape, running_var: Array, weight: Array | None, eps: float, layout: str
) -> Array:
    operands = {"g": _seen(k, g, layout), "scale": _meeting(_scale(k, running_var, weight, eps)[1])}
    return k.elementwise(("g * scale",), operands, (g.dtype,))[0].reshape(input_shape)


@batch_norm_inference.cuda_vjp("channels", "weight", "bias", when=_no_running)
def _(
    k: Launcher, g: Array, input: Array, running_mean: Array, running_var: Array, eps: float, layout: str
) -> tuple[Array, Array]:
    a, b = slopes(k, _seen(k, g, layout), _seen(k, input, layout), running_mean)
    return k.elementwise(("b / sqrtf(var + eps)",), {"b": b, "var": running_var, "eps": eps}, (float32,))[0], a


batch_norm_train.perf_samples(
    sample((2, 5, 100, 99), (5,), (5,)),
    sample((2, 3, 64, 80), (3,), (3,)),
    sample((5, 11, 13, 40), (40,), (40,), layout="NHWC"),
)

batch_norm_inference.perf_samples(
    sample((2, 3, 64, 80), (3,), positive(3), (3,), (3,)),
    sample((5, 11, 13, 40), (40,), positive(40), (40,), (40,), layout="NHWC"),
)
