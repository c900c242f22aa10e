"""Losses between predictions and probabilities. `reduction` is "mean", "sum" or "none", as in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array
from ..namespace import Namespace, is_numpy
from ..op import ErrorSample, primitive, sample
from ..op_samples import Values, positive
from ..ops.loss.regression import PairLoss, check_pair, pair_loss_kernels, reduced, share
from ..ops.pointwise.unary import sigmoid_value
from .rectifiers import softplus_value


@primitive(torch="nn.functional.binary_cross_entropy")
def binary_cross_entropy(
    xp: Namespace, input: Array, target: Array, weight: Array | None = None, *, reduction: str = "mean"
) -> Array:
    """-weight * (target * log(input) + (1 - target) * log(1 - input)), the logarithms not below -100

    Args:
        input: probabilities.
        target: probabilities, in input's shape.
        weight: a factor that broadcasts to input, or None.
        reduction: "mean", "sum" or "none".

    Returns:
        A number, or input's shape.

    Raises:
        ValueError: an input outside of [0, 1], where arrays are on the CPU.
    """
    check_pair("binary_cross_entropy", input, target)
    if is_numpy(xp) and not np.all((input >= 0) & (input <= 1)):
        raise ValueError("binary_cross_entropy: expected probabilities, in [0, 1]; logits have a loss of their own")
    loss = (target - 1.0) * _log_rest(xp, input) - target * _log(xp, input)
    return reduced(xp, loss if weight is None else loss * weight, reduction)


def _log(xp: Namespace, x: Array) -> Array:
    """log(x), at least -100."""
    return xp.maximum(xp.log(xp.maximum(x, 1e-44)), -100.0)  # 1e-44: below e^-100, above zero in fp32 too


def _log_rest(xp: Namespace, x: Array) -> Array:
    """log(1 - x), -100 where x is 1: the next number below it has -37. Exact where x is next to nothing."""
    whole = x >= 1.0
    return xp.where(whole, -100.0, xp.log1p(-xp.where(whole, 0.0, x)))


@binary_cross_entropy.vjp("input")
def _(xp: Namespace, g: Array, input: Array, target: Array, weight: Array | None, reduction: str) -> Array:
    slope = (input - target) / xp.maximum((1.0 - input) * input, 1e-12)
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


@binary_cross_entropy.vjp("target")
def _(xp: Namespace, g: Array, input: Array, weight: Array | None, reduction: str) -> Array:
    slope = _log_rest(xp, input) - _log(xp, input)
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


binary_cross_entropy.grad_unsupported("weight")

_WEIGHTED = "only without weights"

_LOG, _LOG_REST = "larger(logf(larger(input, 1e-44f)), -100.f)", "(input >= 1.f ? -100.f : log1pf(-input))"

_OF_PROBABILITIES = PairLoss(
    f"(target - 1.f) * {_LOG_REST} - target * {_LOG}",
    "(input - target) / larger((1.f - input) * input, 1e-12f)",
    f"{_LOG_REST} - {_LOG}",
)

pair_loss_kernels(binary_cross_entropy, lambda weight: _OF_PROBABILITIES if weight is None else _WEIGHTED)

binary_cross_entropy.errors(
    ErrorSample(sample((2, 3), (3,)), ShapeError, "must have one shape"),
    ErrorSample(sample(Values((2,), 1.5, 2.0), (2,)), ValueError, "expected probabilities"),
)

binary_cross_entropy.samples(
    sample(Values((2, 3), 0.1, 0.9), Values((2, 3), 0.0, 1.0)),
    sample(Values((2, 3), 0.1, 0.9), Values((2, 3), 0.0, 1.0), positive(3), reduction="sum"),
    sample(Values((2, 3), 0.1, 0.9), Values((2, 3), 0.0, 1.0), reduction="none"),
)


@primitive(torch="nn.functional.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    xp: Namespace,
    input: Array,
    target: Array,
    weight: Array | None = None,
    *,
    reduction: str = "mean",
    pos_weight: Array | None = None,
) -> Array:
    """-weight * (pos_weight * target * log(sigmoid(input)) + (1 - target) * log(1 - sigmoid(input))), stably

    Args:
        input: logits.
        target, weight, reduction: as in `binary_cross_entropy`.
        pos_weight: a factor of the positive part, or None.

    Returns:
        A number, or input's shape.
    """
    check_pair("binary_cross_entropy_with_logits", input, target)
    loss = (1.0 - target) * input + _positive_part(target, pos_weight) * softplus_value(xp, -input)
    return reduced(xp, loss if weight is None else loss * weight, reduction)


def _positive_part(target: Array, pos_weight: Array | None) -> Any:
    return 1.0 if pos_weight is None else (pos_weight - 1.0) * target + 1.0


@binary_cross_entropy_with_logits.vjp("input")
def _(
    xp: Namespace, g: Array, input: Array, target: Array, weight: Array | None, pos_weight: Array | None, reduction: str
) -> Array:
    positive = target if pos_weight is None else pos_weight * target
    slope = _positive_part(target, pos_weight) * sigmoid_value(xp, input) - positive
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


@binary_cross_entropy_with_logits.vjp("target")
def _(xp: Namespace, g: Array, input: Array, weight: Array | None, pos_weight: Array | None, reduction: str) -> Array:
    slope = -input if pos_weight is None else (pos_weight - 1.0) * softplus_value(xp, -input) - input
    return share(g, input.size, reduction) * (slope if weight is None else slope * weight)


binary_cross_entropy_with_logits.grad_unsupported("weight", "pos_weight")

_OF_LOGITS = PairLoss("(1.f - target) * input + softplus(-input)", "sigmoid(input) - target", "-input")

pair_loss_kernels(
    binary_cross_entropy_with_logits,
    lambda weight, pos_weight: _OF_LOGITS if weight is None and pos_weight is None else _WEIGHTED,
)

binary_cross_entropy_with_logits.samples(
    sample((2, 3), Values((2, 3), 0.0, 1.0)),
    sample((2, 3), Values((2, 3), 0.0, 1.0), positive(2, 3), reduction="sum", pos_weight=positive(3)),
    sample((2, 3), Values((2, 3), 0.0, 1.0), reduction="none"),
)

binary_cross_entropy_with_logits.errors(ErrorSample(sample((2, 3), (3,)), ShapeError, "must have one shape"))


@primitive(torch="nn.functional.kl_div")
def kl_div(xp: Namespace, input: Array, target: Array, *, reduction: str = "mean", log_target: bool = False) -> Array:
    """target * (log(target) - input), for log-probabilities input; log_target says that target holds logarithms too

    reduction "batchmean" divides the sum by the size of dim 0, which is what the name promises; "mean" by all.

    Args:
        input: log-probabilities.
        target: probabilities, in input's shape.
        reduction: "mean", "sum", "none" or "batchmean".
        log_target: whether target holds logarithms.

    Returns:
        A number, or input's shape.
    """
    check_pair("kl_div", input, target)
    if log_target:
        loss = xp.exp(target) * (target - input)
    else:
        loss = xp.where(target > 0, target * xp.log(xp.where(target > 0, target, 1.0)), 0.0) - target * input
    return xp.sum(loss) / _batch(input) if reduction == "batchmean" else reduced(xp, loss, reduction)


def _batch(input: Array) -> int:
    return input.shape[0] if input.ndim else 1


def _kl_share(g: Array, input: Array, reduction: str) -> Array:
    return g / _batch(input) if reduction == "batchmean" else share(g, input.size, reduction)


@kl_div.vjp("input")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str, log_target: bool) -> Array:
    return -_kl_share(g, input, reduction) * (xp.exp(target) if log_target else target)


@kl_div.vjp("target")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str, log_target: bool) -> Array:
    if log_target:
        return _kl_share(g, input, reduction) * xp.exp(target) * (target - input + 1.0)
    slope = xp.log(xp.where(target > 0, target, 1.0)) + 1.0 - input
    return _kl_share(g, input, reduction) * xp.where(target > 0, slope, 0.0)


_OF_TARGETS = PairLoss(
    "(target > 0.f ? target * logf(target) : 0.f) - target * input",
    "-target",
    "target > 0.f ? logf(target) + 1.f - input : 0.f",
)

_OF_LOG_TARGETS = PairLoss("e_to(target) * (target - input)", "-e_to(target)", "e_to(target) * (target - input + 1.f)")

pair_loss_kernels(
    kl_div,
    lambda log_target: _OF_LOG_TARGETS if log_target else _OF_TARGETS,
    ("mean", "sum", "none", "batchmean"),
)

kl_div.samples(
    sample((2, 3), positive(2, 3)),
    sample((2, 3), positive(2, 3), reduction="batchmean"),
    sample((), positive(), reduction="batchmean"),
    sample((2, 3), positive(2, 3), reduction="sum"),
    sample((2, 3), (2, 3), reduction="none", log_target=True),
)

for _op, _low in ((binary_cross_entropy, 0.1), (binary_cross_entropy_with_logits, -2.0)):
    _op.perf_samples(
        *(
            sample(Values((3, 70, 129), _low, 0.9), Values((3, 70, 129), 0.0, 1.0), reduction=r)
            for r in ("mean", "none")
        )
    )

kl_div.perf_samples(sample((37, 700), positive(37, 700), reduction="batchmean"))

kl_div.errors(ErrorSample(sample((2, 3), (3,)), ShapeError, "must have one shape"))
