"""The loss between predictions and classes, from logits or log-probabilities. `reduction` is as in `loss`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, int32, int64, is_float
from ...namespace import Namespace, is_numpy
from ...op import ErrorSample, primitive, sample
from ...op_samples import integers, positive
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape, class_dim, size_along
from ..indexing.embedding import check_within
from .cross_entropy_launch import Logits, chosen, entropy, slope_operands, totals
from .regression import check_pair, reduced


@primitive(torch="nn.functional.nll_loss", aux=("total",))
def nll_loss(
    xp: Namespace,
    input: Array,
    target: Array,
    weight: Array | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[Array, Array]:
    """-weight[target] * input[target] along the class dim; the mean is over the weights, ignore_index counts nothing

    input holds log-probabilities, (C,) or (B, C, ...); target the classes, () or (B, ...).
    """
    w = _class_weights(xp, input, target, weight, ignore_index)
    dim = class_dim(input.shape)
    ignored = target == ignore_index
    at = xp.expand_dims(xp.where(ignored, 0, target), dim)
    chosen = xp.squeeze(xp.take_along_axis(input, at, axis=dim), dim)
    loss, total = -w * xp.where(ignored, 0.0, chosen), xp.sum(w)
    return (xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)), total


def _class_weights(xp: Namespace, input: Array, target: Array, weight: Array | None, ignore_index: int) -> Array:
    """Each target's weight, zero where it is ignored. Raises where shapes do not fit or there is no such class."""
    dim = class_dim(input.shape)
    if input.ndim == 0 or tuple(target.shape) != (*input.shape[:dim], *input.shape[dim + 1 :]):
        raise ShapeError(
            f"nll_loss: expected input (B, C, ...) and classes (B, ...), "
            f"got {tuple(input.shape)}, {tuple(target.shape)}"
        )
    if target.dtype.kind not in "iu":
        raise ShapeError(f"nll_loss: expected whole-number classes, got {target.dtype.name}")
    _check_weight(input, weight)
    ignored = target == ignore_index
    classes = xp.where(ignored, 0, target)
    check_within(xp, "nll_loss", classes[~ignored] if is_numpy(xp) else classes, input.shape[dim])
    counted = (~ignored).astype(input.dtype)
    return counted if weight is None else counted * weight[classes]


def _check_weight(input: Array, weight: Array | None) -> None:
    """Raises ShapeError unless there is a weight for each class."""
    classes = input.shape[class_dim(input.shape)]
    if weight is not None and weight.shape != (classes,):
        raise ShapeError(f"nll_loss: expected {classes} weights, one a class, got shape {tuple(weight.shape)}")


def _divisor(xp: Namespace, total: Array, target: Array, ignore_index: int) -> Array:
    """What a mean's gradients are divided by: where all targets are ignored they are zero, though the mean is not."""
    return xp.where(xp.all(target == ignore_index), 1.0, total)


nll_loss.non_differentiable("target")
nll_loss.grad_unsupported("weight")


@nll_loss.vjp("input")
def _(
    xp: Namespace,
    g: Array,
    input_shape: Shape,
    input: Array,
    target: Array,
    weight: Array | None,
    total: Array,
    ignore_index: int,
    reduction: str,
) -> Array:
    w = _class_weights(xp, input, target, weight, ignore_index)
    each = -g * (w / _divisor(xp, total, target, ignore_index) if reduction == "mean" else w)
    dim = class_dim(input_shape)
    classes = xp.arange(input_shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(input_shape))])
    return xp.where(classes == xp.expand_dims(target, dim), xp.expand_dims(each, dim), 0.0)


nll_loss.samples(
    sample((4, 3), integers(3, 4)),
    sample((2, 3, 4), integers(3, 2, 4), positive(3), reduction="sum"),
    sample((4, 3), integers(3, 4), positive(3), ignore_index=1),
    sample((4, 3), integers(3, 4), ignore_index=1, reduction="none"),
    sample((3,), integers(3)),
)
nll_loss.errors(
    ErrorSample(sample((4, 3), integers(3, 3)), ShapeError, r"got \(4, 3\), \(3,\)"),
    ErrorSample(sample((4, 3), integers(3, 4), positive(4)), ShapeError, r"expected 3 weights.*got shape \(4,\)"),
    ErrorSample(sample((2, 3), np.array([3, 0])), IndexError, r"in \[0, 3\), got 0 to 3"),
    ErrorSample(sample((2, 3), np.array([-1, -100])), IndexError, r"in \[0, 3\), got -1 to -1"),
    ErrorSample(sample((4, 3), (4,)), ShapeError, "expected whole-number classes, got float64"),
)


@primitive(torch="nn.functional.cross_entropy", aux=("peak", "rest", "mass", "total"), accepts_integers=("target",))
def cross_entropy(
    xp: Namespace,
    input: Array,
    target: Array,
    weight: Array | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Array, Array, Array, Array, Array]:
    """-sum(target * log_softmax(input)) over the classes, dim 1 of input (B, C, ...) or dim 0 of (C,)

    target holds classes, (B, ...), or probabilities in input's shape. label_smoothing mixes in the uniform
    distribution (arXiv 1512.00567). With classes the mean is over their weights, with probabilities over B and space.
    """
    dim = class_dim(input.shape)
    if not size_along(input.shape, dim, "cross_entropy"):
        raise ShapeError(f"cross_entropy: expected at least one class, got {tuple(input.shape)}")
    peak = xp.max(input, axis=dim, keepdims=True) if input.size else input
    rest = xp.log(xp.sum(xp.exp(input - peak), axis=dim, keepdims=True))
    parts, total = _parts(xp, input, target, weight, ignore_index, label_smoothing)
    loss = -xp.sum(parts * xp.where(parts == 0, 0.0, input - peak - rest), axis=dim)
    result = xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)
    return result, peak, rest, xp.sum(parts, axis=dim, keepdims=True), total


def _parts(
    xp: Namespace, input: Array, target: Array, weight: Array | None, ignore_index: int, smoothing: float
) -> tuple[Array, Any]:
    """The factor of each class's log-probability, in input's shape, and what a mean divides by."""
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"cross_entropy: expected label_smoothing in [0, 1], got {smoothing}")
    dim = class_dim(input.shape)
    along = [-1 if d == dim else 1 for d in range(input.ndim)]
    by_class = 1.0 if weight is None else weight.reshape(along)
    even = smoothing / input.shape[dim]
    if is_float(target.dtype):
        check_pair("cross_entropy", input, target)
        _check_weight(input, weight)
        return by_class * (target * (1.0 - smoothing) + even), xp.full((), _places(input), input.dtype)
    w = _class_weights(xp, input, target, weight, ignore_index)
    chosen = xp.arange(input.shape[dim]).reshape(along) == xp.expand_dims(target, dim)
    parts = xp.where(chosen, xp.expand_dims(w, dim), 0.0)
    if smoothing:
        counted = xp.expand_dims(target != ignore_index, dim)
        parts = parts * (1.0 - smoothing) + even * by_class * counted
    return parts, xp.sum(w)


def _places(input: Array) -> int:
    """How many losses there are."""
    return input.size // max(input.shape[class_dim(input.shape)], 1)


def _each(xp: Namespace, g: Array, dim: int, total: Any, reduction: str) -> Array:
    """The gradient of each entry's loss, ready to be spread over the classes."""
    return g / total if reduction == "mean" else g if reduction == "sum" else xp.expand_dims(g, dim)


cross_entropy.grad_unsupported("weight")


@cross_entropy.vjp("input")
def _(
    xp: Namespace,
    g: Array,
    input: Array,
    target: Array,
    weight: Array | None,
    peak: Array,
    rest: Array,
    mass: Array,
    total: Array,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Array:
    dim = class_dim(input.shape)
    parts, _ = _parts(xp, input, target, weight, ignore_index, label_smoothing)
    slope = xp.exp(input - peak - rest) * mass - parts
    if not is_float(target.dtype):
        total = _divisor(xp, total, target, ignore_index)
    return _each(xp, g, dim, total, reduction) * slope


@cross_entropy.vjp("target")
def _(
    xp: Namespace,
    g: Array,
    input: Array,
    weight: Array | None,
    peak: Array,
    rest: Array,
    total: Array,
    reduction: str,
    label_smoothing: float,
) -> Array:
    dim = class_dim(input.shape)
    by_class = 1.0 if weight is None else weight.reshape([-1 if d == dim else 1 for d in range(input.ndim)])
    return -_each(xp, g, dim, total, reduction) * (1.0 - label_smoothing) * by_class * (input - peak - rest)


cross_entropy.samples(
    sample((4, 3), integers(3, 4)),
    sample((2, 3, 4), integers(3, 2, 4), positive(3), reduction="sum"),
    sample((4, 3), integers(3, 4), positive(3), ignore_index=1, label_smoothing=0.1),
    sample((4, 3), integers(3, 4), ignore_index=1, reduction="none", label_smoothing=0.2),
    sample((4, 3), positive(4, 3), positive(3), label_smoothing=0.1),
    sample((2, 3, 2), positive(2, 3, 2), reduction="none"),
    sample((3,), integers(3)),
)
cross_entropy.errors(
    ErrorSample(sample((4, 3), integers(3, 3)), ShapeError, r"got \(4, 3\), \(3,\)"),
    ErrorSample(sample((4, 3), integers(3, 4), positive(4)), ShapeError, r"expected 3 weights.*got shape \(4,\)"),
    ErrorSample(sample((2, 3), np.array([3, 0])), IndexError, r"in \[0, 3\), got 0 to 3"),
    ErrorSample(sample((2, 3), np.array([-1, -100])), IndexError, r"in \[0, 3\), got -1 to -1"),
    ErrorSample(sample((4, 0), integers(3, 4), label_smoothing=0.1), ShapeError, "at least one class, got"),
    ErrorSample(sample((4, 3), (4, 2)), ShapeError, "cross_entropy: .* must have one shape"),
    ErrorSample(sample((4, 3), positive(4, 3), positive(1)), ShapeError, "expected 3 weights"),
    ErrorSample(sample((4, 3), integers(3, 4), label_smoothing=2.0), ValueError, r"in \[0, 1\], got 2.0"),
    ErrorSample(sample((4, 3), integers(3, 4), reduction="max"), ValueError, "got 'max'"),
)


# ---- kernels ------------------------------------------------------------------------------------------------------

_EXACT = 1 << 24  # fp32 holds every whole number up to this


def _no_losses(input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str) -> str:
    """Why the kernels cannot take these arguments; those that are refused are left to the reference to refuse."""
    if reason := same(AT_MOST_FP32, input, weight):
        return reason
    if not 0 < input.size < 2**31:
        return "nothing to compute with, or too much"
    dim = class_dim(input.shape)
    fits = target.shape == (*input.shape[:dim], *input.shape[dim + 1 :]) and reduction in ("mean", "sum", "none")
    if not fits or (weight is not None and weight.shape != (input.shape[dim],)):
        return "shapes or a reduction that are refused"
    if target.dtype not in (int32, int64):
        return f"no kernel for classes in {target.dtype.name}"
    return "" if max(abs(ignore_index), input.shape[dim]) <= _EXACT else "more classes than fp32 counts"


def _no_entropy(
    input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str, label_smoothing: float
) -> str:
    if not 0.0 <= label_smoothing <= 1.0:
        return "a smoothing that is refused"
    if not is_float(target.dtype):
        return _no_losses(input, target, weight, ignore_index, reduction)
    fits = target.shape == input.shape != () and reduction in ("mean", "sum", "none")
    if not fits or (weight is not None and weight.shape != (input.shape[class_dim(input.shape)],)):
        return "shapes or a reduction that are refused"
    return same(AT_MOST_FP32, input, target, weight) or ("" if 0 < input.size < 2**31 else "nothing, or too much")


@nll_loss.cuda("flame", when=_no_losses)
def _(
    k: Launcher, input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str
) -> tuple[Array, Array]:
    x = Logits.of(k, input)
    return totals(k, x, *chosen(k, x, target, weight, ignore_index), reduction)


@nll_loss.cuda_vjp("flame", "input", when=_no_losses)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    target: Array,
    weight: Array | None,
    total: Array,
    ignore_index: int,
    reduction: str,
) -> Array:
    x = Logits.of(k, input)
    operands = slope_operands(k, x, g, target, weight, total, ignore_index, reduction)
    value = "target == at && target != ignored ? -weight * (g / total) : 0.f"
    return k.elementwise((value,), operands, (input.dtype,), x.x.shape)[0].reshape(x.shape)


@cross_entropy.cuda("flame", when=_no_entropy)
def _(
    k: Launcher,
    input: Array,
    target: Array,
    weight: Array | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> tuple[Array, Array, Array, Array, Array]:
    x = Logits.of(k, input)
    peak, rest, mass, loss, weigh = entropy(k, x, target, weight, ignore_index, label_smoothing)
    result, total = totals(k, x, loss, weigh, reduction)
    kept = x.kept()
    return result, peak.reshape(kept), rest.reshape(kept), mass.reshape(kept), total


@cross_entropy.cuda_vjp("flame", "input", when=_no_entropy)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    target: Array,
    weight: Array | None,
    peak: Array,
    rest: Array,
    mass: Array,
    total: Array,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Array:
    x = Logits.of(k, input)
    operands = slope_operands(k, x, g, target, weight, total, ignore_index, reduction)
    operands |= {"peak": x.spread(peak), "rest": x.spread(rest), "mass": x.spread(mass)}
    operands |= {"input": x.x, "share": 1.0 - label_smoothing, "even": label_smoothing / x.x.shape[1]}
    part = "(target == at ? share : 0.f)" if not is_float(target.dtype) else "target * share"
    counts = "target != ignored" if not is_float(target.dtype) else "true"
    factor = f"float factor = {counts} ? weight * ({part} + even) : 0.f"
    value = f"{factor}; {counts} ? (e_to(input - peak - rest) * mass - factor) * (g / total) : 0.f"
    return k.elementwise((value,), operands, (input.dtype,), x.x.shape)[0].reshape(x.shape)


@cross_entropy.cuda_vjp("flame", "target", when=_no_entropy)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    target: Array,
    weight: Array | None,
    peak: Array,
    rest: Array,
    total: Array,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Array:
    x = Logits.of(k, input)
    operands = slope_operands(k, x, g, target, weight, total, ignore_index, reduction)
    operands |= {"input": x.x, "peak": x.spread(peak), "rest": x.spread(rest), "share": 1.0 - label_smoothing}
    value = "-share * weight * (input - peak - rest) * (g / total)"
    return k.elementwise((value,), operands, (target.dtype,), x.x.shape)[0].reshape(x.shape)


cross_entropy.perf_samples(
    sample((11, 3001), integers(3001, 11), ignore_index=7, label_smoothing=0.1),
    sample((5, 4096), integers(4096, 5), positive(4096), reduction="none"),
    sample((2, 21, 24, 32), integers(21, 2, 24, 32), ignore_index=20),
    sample((3, 9, 7), positive(3, 9, 7), positive(9)),
    sample((1, 2, 17000), integers(2, 1, 17000), positive(2)),
)
nll_loss.perf_samples(
    sample((2, 21, 24, 32), integers(21, 2, 24, 32), positive(21), ignore_index=20),
    sample((1, 2, 17000), integers(2, 1, 17000)),
)
