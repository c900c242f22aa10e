"""Losses between predictions and classes or probabilities. `reduction` is "mean", "sum" or "none", as in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ShapeError
from ..dtype import Array, is_float
from ..op import ErrorSample, Sample, primitive, sample
from ..sample import Values, integers, positive
from .activations import softplus_value
from .dims import Shape
from .loss import check_pair, reduced, share
from .pointwise import sigmoid_value
from .softmax import log_softmax


@primitive(torch="nn.functional.nll_loss")
def nll_loss(
    xp: Any, input: Array, target: Array, weight: Array | None = None, *, ignore_index: int = -100,
    reduction: str = "mean",
) -> Array:  # fmt: skip
    """-weight[target] * input[target] along the class dim; the mean is over the weights, ignore_index counts nothing

    input holds log-probabilities, (C,) or (B, C, ...); target the classes, () or (B, ...).
    """
    w = _class_weights(xp, input, target, weight, ignore_index)
    dim = _class_dim(input.shape)
    at = xp.expand_dims(xp.where(target == ignore_index, 0, target), dim)
    loss = -w * xp.squeeze(xp.take_along_axis(input, at, axis=dim), dim)
    return reduced(xp, loss, reduction) if reduction != "mean" else xp.sum(loss) / xp.sum(w)


def _class_dim(shape: Shape) -> int:
    return 0 if len(shape) == 1 else 1


def _class_weights(xp: Any, input: Array, target: Array, weight: Array | None, ignore_index: int) -> Array:
    """Each target's weight, zero where it is ignored. Raises ShapeError where the shapes do not fit."""
    dim = _class_dim(input.shape)
    if input.ndim == 0 or tuple(target.shape) != (*input.shape[:dim], *input.shape[dim + 1 :]):
        raise ShapeError(
            f"nll_loss: expected input (B, C, ...) and classes (B, ...), "
            f"got {tuple(input.shape)}, {tuple(target.shape)}"
        )
    if target.dtype.kind not in "iu":
        raise ShapeError(f"nll_loss: expected whole-number classes, got {target.dtype.name}")
    counted = (target != ignore_index).astype(input.dtype)
    return counted if weight is None else counted * weight[xp.where(target == ignore_index, 0, target)]


nll_loss.nograd("target", "weight")


@nll_loss.vjp("input")
def _(
    xp: Any, g: Array, input_shape: Shape, input: Array, target: Array, weight: Array | None, ignore_index: int,
    reduction: str,
) -> Array:  # fmt: skip
    w = _class_weights(xp, input, target, weight, ignore_index)
    each = -g * (w / xp.sum(w) if reduction == "mean" else w)
    dim = _class_dim(input_shape)
    classes = xp.arange(input_shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(input_shape))])
    return xp.where(classes == xp.expand_dims(target, dim), xp.expand_dims(each, dim), 0.0)


@nll_loss.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), integers(3, 4))
    yield sample((2, 3, 4), integers(3, 2, 4), positive(3), reduction="sum")
    yield sample((4, 3), integers(3, 4), positive(3), ignore_index=1)
    yield sample((4, 3), integers(3, 4), ignore_index=1, reduction="none")
    yield sample((3,), integers(3))


@nll_loss.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 3), integers(3, 3)), ShapeError, r"got \(4, 3\), \(3,\)")
    yield ErrorSample(sample((4, 3), (4,)), ShapeError, "expected whole-number classes, got float64")


@primitive(torch="nn.functional.cross_entropy", aux=("logs",))
def cross_entropy(
    xp: Any, input: Array, target: Array, weight: Array | None = None, *, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple[Array, Array]:  # fmt: skip
    """-sum(target * log_softmax(input)) over the classes, dim 1 of input (B, C, ...) or dim 0 of (C,)

    target holds classes, (B, ...), or probabilities in input's shape. label_smoothing mixes in the uniform
    distribution (arXiv 1512.00567). With classes the mean is over their weights, with probabilities over B and space.
    """
    dim = _class_dim(input.shape)
    logs = log_softmax.fn(xp, input, dim)
    parts, total = _parts(xp, input, target, weight, ignore_index, label_smoothing)
    loss = -xp.sum(parts * logs, axis=dim)
    return (xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)), logs


def _parts(
    xp: Any, input: Array, target: Array, weight: Array | None, ignore_index: int, smoothing: float
) -> tuple[Array, Any]:
    """The factor of each class's log-probability, in input's shape, and what a mean divides by."""
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"cross_entropy: expected label_smoothing in [0, 1], got {smoothing}")
    dim = _class_dim(input.shape)
    along = [-1 if d == dim else 1 for d in range(input.ndim)]
    by_class = 1.0 if weight is None else weight.reshape(along)
    even = smoothing / input.shape[dim]
    if is_float(target.dtype):
        check_pair("cross_entropy", input, target)
        return by_class * (target * (1.0 - smoothing) + even), input.size // max(input.shape[dim], 1)
    w = _class_weights(xp, input, target, weight, ignore_index)
    chosen = xp.arange(input.shape[dim]).reshape(along) == xp.expand_dims(target, dim)
    parts = xp.where(chosen, xp.expand_dims(w, dim), 0.0)
    if smoothing:
        counted = xp.expand_dims(target != ignore_index, dim)
        parts = parts * (1.0 - smoothing) + even * by_class * counted
    return parts, xp.sum(w)


def _each(xp: Any, g: Array, dim: int, total: Any, reduction: str) -> Array:
    """The gradient of each entry's loss, ready to be spread over the classes."""
    return g / total if reduction == "mean" else g if reduction == "sum" else xp.expand_dims(g, dim)


@cross_entropy.vjp("input")
def _(
    xp: Any, g: Array, input: Array, target: Array, weight: Array | None, logs: Array, ignore_index: int,
    reduction: str, label_smoothing: float,
) -> Array:  # fmt: skip
    dim = _class_dim(input.shape)
    parts, total = _parts(xp, input, target, weight, ignore_index, label_smoothing)
    slope = xp.exp(logs) * xp.sum(parts, axis=dim, keepdims=True) - parts
    return _each(xp, g, dim, total, reduction) * slope


@cross_entropy.vjp("target")
def _(xp: Any, g: Array, weight: Array | None, logs: Array, reduction: str, label_smoothing: float) -> Array:
    dim = _class_dim(logs.shape)
    by_class = 1.0 if weight is None else weight.reshape([-1 if d == dim else 1 for d in range(logs.ndim)])
    total = logs.size // max(logs.shape[dim], 1)
    return -_each(xp, g, dim, total, reduction) * (1.0 - label_smoothing) * by_class * logs


cross_entropy.nograd("weight")


@cross_entropy.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), integers(3, 4))
    yield sample((2, 3, 4), integers(3, 2, 4), positive(3), reduction="sum")
    yield sample((4, 3), integers(3, 4), positive(3), ignore_index=1, label_smoothing=0.1)
    yield sample((4, 3), integers(3, 4), ignore_index=1, reduction="none", label_smoothing=0.2)
    yield sample((4, 3), positive(4, 3), positive(3), label_smoothing=0.1)
    yield sample((2, 3, 2), positive(2, 3, 2), reduction="none")
    yield sample((3,), integers(3))


@cross_entropy.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 3), integers(3, 3)), ShapeError, r"got \(4, 3\), \(3,\)")
    yield ErrorSample(sample((4, 3), (4, 2)), ShapeError, "cross_entropy: .* must have one shape")
    yield ErrorSample(sample((4, 3), integers(3, 4), label_smoothing=2.0), ValueError, r"in \[0, 1\], got 2.0")
    yield ErrorSample(sample((4, 3), integers(3, 4), reduction="max"), ValueError, "got 'max'")


@primitive(torch="nn.functional.binary_cross_entropy")
def binary_cross_entropy(
    xp: Any, input: Array, target: Array, weight: Array | None = None, *, reduction: str = "mean"
) -> Array:
    """-weight * (target * log(input) + (1 - target) * log(1 - input)), the logarithms not below -100"""
    check_pair("binary_cross_entropy", input, target)
    loss = (target - 1.0) * _log(xp, 1.0 - input) - target * _log(xp, input)
    return reduced(xp, loss if weight is None else loss * weight, reduction)


def _log(xp: Any, x: Array) -> Array:
    """log(x), at least -100."""
    return xp.maximum(xp.log(xp.maximum(x, 1e-44)), -100.0)  # 1e-44: below e^-100, above zero in fp32 too


@binary_cross_entropy.vjp("input")
def _(xp: Any, g: Array, input: Array, target: Array, weight: Array | None, reduction: str) -> Array:
    slope = (input - target) / xp.maximum((1.0 - input) * input, 1e-12)
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


@binary_cross_entropy.vjp("target")
def _(xp: Any, g: Array, input: Array, weight: Array | None, reduction: str) -> Array:
    slope = _log(xp, 1.0 - input) - _log(xp, input)
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


binary_cross_entropy.nograd("weight")


@binary_cross_entropy.samples
def _() -> Iterator[Sample]:
    yield sample(Values((2, 3), 0.1, 0.9), Values((2, 3), 0.0, 1.0))
    yield sample(Values((2, 3), 0.1, 0.9), Values((2, 3), 0.0, 1.0), positive(3), reduction="sum")
    yield sample(Values((2, 3), 0.1, 0.9), Values((2, 3), 0.0, 1.0), reduction="none")


@primitive(torch="nn.functional.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    xp: Any, input: Array, target: Array, weight: Array | None = None, *, reduction: str = "mean",
    pos_weight: Array | None = None,
) -> Array:  # fmt: skip
    """-weight * (pos_weight * target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input))), stably"""
    check_pair("binary_cross_entropy_with_logits", input, target)
    loss = (1.0 - target) * input + _positive_part(target, pos_weight) * softplus_value(xp, -input)
    return reduced(xp, loss if weight is None else loss * weight, reduction)


def _positive_part(target: Array, pos_weight: Array | None) -> Any:
    return 1.0 if pos_weight is None else (pos_weight - 1.0) * target + 1.0


@binary_cross_entropy_with_logits.vjp("input")
def _(
    xp: Any, g: Array, input: Array, target: Array, weight: Array | None, pos_weight: Array | None, reduction: str
) -> Array:
    slope = 1.0 - target - _positive_part(target, pos_weight) * sigmoid_value(xp, -input)
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


@binary_cross_entropy_with_logits.vjp("target")
def _(xp: Any, g: Array, input: Array, weight: Array | None, pos_weight: Array | None, reduction: str) -> Array:
    slope = -input if pos_weight is None else (pos_weight - 1.0) * softplus_value(xp, -input) - input
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


binary_cross_entropy_with_logits.nograd("weight", "pos_weight")


@binary_cross_entropy_with_logits.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3), Values((2, 3), 0.0, 1.0))
    yield sample((2, 3), Values((2, 3), 0.0, 1.0), positive(2, 3), reduction="sum", pos_weight=positive(3))
    yield sample((2, 3), Values((2, 3), 0.0, 1.0), reduction="none")


for _op in (binary_cross_entropy, binary_cross_entropy_with_logits):

    @_op.errors
    def _() -> Iterator[ErrorSample]:
        yield ErrorSample(sample((2, 3), (3,)), ShapeError, "must have one shape")


@primitive(torch="nn.functional.kl_div")
def kl_div(xp: Any, input: Array, target: Array, *, reduction: str = "mean", log_target: bool = False) -> Array:
    """target * (log(target) - input), for log-probabilities input; log_target says that target holds logarithms too

    reduction "batchmean" divides the sum by the size of dim 0, which is what the name promises; "mean" by all.
    """
    check_pair("kl_div", input, target)
    if log_target:
        loss = xp.exp(target) * (target - input)
    else:
        loss = xp.where(target > 0, target * xp.log(xp.where(target > 0, target, 1.0)), 0.0) - target * input
    return xp.sum(loss) / input.shape[0] if reduction == "batchmean" else reduced(xp, loss, reduction)


def _kl_share(g: Array, input: Array, reduction: str) -> Array:
    return g / input.shape[0] if reduction == "batchmean" else share(g, input.size, reduction)


@kl_div.vjp("input")
def _(xp: Any, g: Array, input: Array, target: Array, reduction: str, log_target: bool) -> Array:
    return -_kl_share(g, input, reduction) * (xp.exp(target) if log_target else target)


@kl_div.vjp("target")
def _(xp: Any, g: Array, input: Array, target: Array, reduction: str, log_target: bool) -> Array:
    if log_target:
        return _kl_share(g, input, reduction) * xp.exp(target) * (target - input + 1.0)
    slope = xp.log(xp.where(target > 0, target, 1.0)) + 1.0 - input
    return _kl_share(g, input, reduction) * xp.where(target > 0, slope, 0.0)


@kl_div.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3), positive(2, 3))
    yield sample((2, 3), positive(2, 3), reduction="batchmean")
    yield sample((2, 3), positive(2, 3), reduction="sum")
    yield sample((2, 3), (2, 3), reduction="none", log_target=True)


@kl_div.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (3,)), ShapeError, "must have one shape")
