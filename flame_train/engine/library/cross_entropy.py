"""The loss between predictions and classes, from logits or log-probabilities. `reduction` is as in `loss`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..arguments import Arguments
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, int32, int64, is_float
from ..namespace import Namespace, is_numpy
from ..op import ErrorSample, primitive, sample
from ..op_samples import integers, positive
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import class_dim, size_along
from ..ops.indexing.embedding import check_within
from ..ops.loss.regression import check_pair, reduced
from .cross_entropy_launch import Classes, Logits, Softmax, entropy, grad_operands, picked, totals


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

    Args:
        input: log-probabilities (C,) or (B, C, ...).
        target: classes, () or (B, ...).
        weight: a factor for each class (C,), or None.
        ignore_index: the class that does not count.
        reduction: "mean", "sum" or "none".

    Returns:
        The loss, and the sum of the weights.
    """
    w = _class_weights(xp, input, Classes(target, weight, ignore_index))
    dim = class_dim(input.shape)
    ignored = target == ignore_index
    at = xp.expand_dims(xp.where(ignored, 0, target), dim)
    log_prob = xp.squeeze(xp.take_along_axis(input, at, axis=dim), dim)
    loss, total = -w * xp.where(ignored, 0.0, log_prob), xp.sum(w)
    return (xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)), total


def _class_weights(xp: Namespace, input: Array, classes: Classes) -> Array:
    """Each target's weight, zero where it is ignored. Raises where shapes do not fit or there is no such class."""
    dim, target, weight = class_dim(input.shape), classes.target, classes.weight
    if input.ndim == 0 or tuple(target.shape) != (*input.shape[:dim], *input.shape[dim + 1 :]):
        raise ShapeError(
            f"nll_loss: expected input (B, C, ...) and classes (B, ...), "
            f"got {tuple(input.shape)}, {tuple(target.shape)}"
        )
    if target.dtype.kind not in "iu":
        raise ShapeError(f"nll_loss: expected whole-number classes, got {target.dtype.name}")
    _check_weight(input, weight)
    ignored = target == classes.ignore_index
    index = xp.where(ignored, 0, target)
    check_within(xp, "nll_loss", index[~ignored] if is_numpy(xp) else index, input.shape[dim])
    counted = (~ignored).astype(input.dtype)
    return counted if weight is None else counted * weight[index]


def _check_weight(input: Array, weight: Array | None) -> None:
    """Raises ShapeError unless there is a weight for each class."""
    classes = input.shape[class_dim(input.shape)]
    if weight is not None and weight.shape != (classes,):
        raise ShapeError(f"nll_loss: expected {classes} weights, one a class, got shape {tuple(weight.shape)}")


def _divisor(xp: Namespace, total: Array, classes: Classes) -> Array:
    """What a mean's gradients are divided by: where all targets are ignored they are zero, though the mean is not."""
    return xp.where(xp.all(classes.target == classes.ignore_index), 1.0, total)


nll_loss.non_differentiable("target")

nll_loss.grad_unsupported("weight")


@nll_loss.vjp("input")
def _(xp: Namespace, g: Array, input: Array, classes: Classes, total: Array, reduction: str) -> Array:
    w = _class_weights(xp, input, classes)
    each = -g * (w / _divisor(xp, total, classes) if reduction == "mean" else w)
    dim = class_dim(input.shape)
    index = xp.arange(input.shape[dim]).reshape(_along(input, dim))
    return xp.where(index == xp.expand_dims(classes.target, dim), xp.expand_dims(each, dim), 0.0)


def _along(input: Array, dim: int) -> list[int]:
    """Returns the shape in which an array with an element for each class broadcasts to `input`."""
    return [-1 if d == dim else 1 for d in range(input.ndim)]


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


@primitive(
    torch="nn.functional.cross_entropy",
    aux=("max_logit", "log_sum", "weight_sum", "total"),
    accepts_integers=("target",),
)
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

    Args:
        input: logits (C,) or (B, C, ...).
        target: classes, () or (B, ...), or probabilities in input's shape.
        weight: a factor for each class (C,), or None.
        ignore_index: the class that does not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the uniform distribution, in [0, 1].

    Returns:
        The loss; each place's largest logit, logarithm of the sum, and sum of factors; what a mean divides by.

    Raises:
        ShapeError: shapes do not fit, or there is no class.
        ValueError: a smoothing or a reduction that is unknown.
    """
    dim = class_dim(input.shape)
    if not size_along(input.shape, dim, "cross_entropy"):
        raise ShapeError(f"cross_entropy: expected at least one class, got {tuple(input.shape)}")
    max_logit = xp.max(input, axis=dim, keepdims=True) if input.size else input
    log_sum = xp.log(xp.sum(xp.exp(input - max_logit), axis=dim, keepdims=True))
    factors, total = _factors(xp, input, Classes(target, weight, ignore_index), label_smoothing)
    loss = -xp.sum(factors * xp.where(factors == 0, 0.0, input - max_logit - log_sum), axis=dim)
    result = xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)
    return result, max_logit, log_sum, xp.sum(factors, axis=dim, keepdims=True), total


def _factors(xp: Namespace, input: Array, classes: Classes, smoothing: float) -> tuple[Array, Any]:
    """Returns the factor of each class's log-probability, in input's shape, and what a mean divides by."""
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"cross_entropy: expected label_smoothing in [0, 1], got {smoothing}")
    dim = class_dim(input.shape)
    target, weight = classes.target, classes.weight
    by_class = 1.0 if weight is None else weight.reshape(_along(input, dim))
    even = smoothing / input.shape[dim]
    if is_float(target.dtype):
        check_pair("cross_entropy", input, target)
        _check_weight(input, weight)
        return by_class * (target * (1.0 - smoothing) + even), xp.full((), _places(input), input.dtype)
    w = _class_weights(xp, input, classes)
    is_target = xp.arange(input.shape[dim]).reshape(_along(input, dim)) == xp.expand_dims(target, dim)
    factors = xp.where(is_target, xp.expand_dims(w, dim), 0.0)
    if smoothing:
        counted = xp.expand_dims(target != classes.ignore_index, dim)
        factors = factors * (1.0 - smoothing) + even * by_class * counted
    return factors, xp.sum(w)


def _places(input: Array) -> int:
    """Returns how many losses there are."""
    return input.size // max(input.shape[class_dim(input.shape)], 1)


@dataclass(frozen=True, slots=True)
class _Reduced(Arguments):
    """How the losses are reduced: by `reduction`, a mean being over `total`."""

    total: Any
    reduction: str

    def spread(self, xp: Namespace, g: Array, dim: int) -> Array:
        """The gradient of each entry's loss, given that of the reduced one, so that it broadcasts over the classes."""
        return g / self.total if self.reduction == "mean" else g if self.reduction == "sum" else xp.expand_dims(g, dim)


@dataclass(frozen=True, slots=True)
class _Smoothed(_Reduced):
    """The same, of losses with smoothed labels."""

    label_smoothing: float


cross_entropy.grad_unsupported("weight")


@cross_entropy.vjp("input")
def _(
    xp: Namespace, g: Array, input: Array, classes: Classes, softmax: Softmax, weight_sum: Array, by: _Smoothed
) -> Array:
    factors, _ = _factors(xp, input, classes, by.label_smoothing)
    derivative = xp.exp(input - softmax.max_logit - softmax.log_sum) * weight_sum - factors
    if not is_float(classes.target.dtype):
        by = replace(by, total=_divisor(xp, by.total, classes))
    return by.spread(xp, g, class_dim(input.shape)) * derivative


@cross_entropy.vjp("target")
def _(xp: Namespace, g: Array, input: Array, weight: Array | None, softmax: Softmax, by: _Smoothed) -> Array:
    dim = class_dim(input.shape)
    by_class = 1.0 if weight is None else weight.reshape(_along(input, dim))
    log_prob = input - softmax.max_logit - softmax.log_sum
    return -by.spread(xp, g, dim) * (1.0 - by.label_smoothing) * by_class * log_prob


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

_EXACT = 1 << 24  # fp32 holds every whole number up to this


def _no_losses(input: Array, classes: Classes, reduction: str) -> str:
    """Says why the kernels cannot take these arguments; those that are refused are left to the reference to refuse."""
    target, weight = classes.target, classes.weight
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
    return "" if max(abs(classes.ignore_index), input.shape[dim]) <= _EXACT else "more classes than fp32 counts"


def _no_entropy(input: Array, classes: Classes, reduction: str, label_smoothing: float) -> str:
    target, weight = classes.target, classes.weight
    if not 0.0 <= label_smoothing <= 1.0:
        return "a smoothing that is refused"
    if not is_float(target.dtype):
        return _no_losses(input, classes, reduction)
    fits = target.shape == input.shape != () and reduction in ("mean", "sum", "none")
    if not fits or (weight is not None and weight.shape != (input.shape[class_dim(input.shape)],)):
        return "shapes or a reduction that are refused"
    return same(AT_MOST_FP32, input, target, weight) or ("" if 0 < input.size < 2**31 else "nothing, or too much")


@nll_loss.cuda("flame", when=_no_losses)
def _(k: Launcher, input: Array, classes: Classes, reduction: str) -> tuple[Array, Array]:
    x = Logits.of(k, input)
    return totals(k, x, *picked(k, x, classes), reduction)


@nll_loss.cuda_vjp("flame", "input", when=_no_losses)
def _(k: Launcher, g: Array, input: Array, classes: Classes, by: _Reduced) -> Array:
    x = Logits.of(k, input)
    operands = grad_operands(k, x, g, classes, by.total, by.reduction)
    value = "target == index && target != ignored ? -weight * (g / total) : 0.f"
    return k.elementwise((value,), operands, (input.dtype,), x.x.shape)[0].reshape(x.shape)


@cross_entropy.cuda("flame", when=_no_entropy)
def _(
    k: Launcher, input: Array, classes: Classes, reduction: str, label_smoothing: float
) -> tuple[Array, Array, Array, Array, Array]:
    x = Logits.of(k, input)
    max_logit, log_sum, weight_sum, loss, loss_weight = entropy(k, x, classes, label_smoothing)
    result, total = totals(k, x, loss, loss_weight, reduction)
    shape = x.reduced_shape()
    return result, max_logit.reshape(shape), log_sum.reshape(shape), weight_sum.reshape(shape), total


@cross_entropy.cuda_vjp("flame", "input", when=_no_entropy)
def _(
    k: Launcher, g: Array, input: Array, classes: Classes, softmax: Softmax, weight_sum: Array, by: _Smoothed
) -> Array:
    x = Logits.of(k, input)
    operands = grad_operands(k, x, g, classes, by.total, by.reduction) | softmax.operands(x)
    operands |= {"weight_sum": x.spread(weight_sum), "share": 1.0 - by.label_smoothing}
    operands |= {"even": by.label_smoothing / x.x.shape[1]}
    by_index = not is_float(classes.target.dtype)
    part = "(target == index ? share : 0.f)" if by_index else "target * share"
    counts = "target != ignored" if by_index else "true"
    factor = f"float factor = {counts} ? weight * ({part} + even) : 0.f"
    value = f"{factor}; {counts} ? (e_to(input - max_logit - log_sum) * weight_sum - factor) * (g / total) : 0.f"
    return k.elementwise((value,), operands, (input.dtype,), x.x.shape)[0].reshape(x.shape)


@cross_entropy.cuda_vjp("flame", "target", when=_no_entropy)
def _(k: Launcher, g: Array, input: Array, classes: Classes, softmax: Softmax, by: _Smoothed) -> Array:
    x = Logits.of(k, input)
    operands = grad_operands(k, x, g, classes, by.total, by.reduction) | softmax.operands(x)
    operands |= {"share": 1.0 - by.label_smoothing}
    value = "-share * weight * (input - max_logit - log_sum) * (g / total)"
    return k.elementwise((value,), operands, (classes.target.dtype,), x.x.shape)[0].reshape(x.shape)
