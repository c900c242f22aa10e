"""Arithmetic of tensors and numbers. Names, defaults and meaning as in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, is_float
from ...namespace import Namespace, is_numpy
from ...op import ErrorSample, primitive, sample
from ...op_samples import NOT_BROADCAST, OF_TWO, Values, apart, integers, positive
from ..common.conditions import floating
from ..common.dims import Shape
from ..common.elementwise_codegen import broadcast_grad, elementwise_kernel
from .unary import unary


@primitive(torch="add", accepts_integers=True)
def add(xp: Namespace, input: Array, other: Array | float, *, alpha: float = 1.0) -> Array:
    """input + alpha * other"""
    return input + other if alpha == 1.0 else input + alpha * other


add.vjp("input")(lambda xp, g: g)

add.vjp("other")(lambda xp, g, alpha: g if alpha == 1.0 else alpha * g)


@primitive(torch="sub", accepts_integers=True)
def sub(xp: Namespace, input: Array, other: Array | float, *, alpha: float = 1.0) -> Array:
    """input - alpha * other"""
    return input - other if alpha == 1.0 else input - alpha * other


sub.vjp("input")(lambda xp, g: g)

sub.vjp("other")(lambda xp, g, alpha: -alpha * g)

elementwise_kernel(add, "input + alpha * other", input="g", other="alpha * g")

elementwise_kernel(sub, "input - alpha * other", input="g", other="-alpha * g")


@primitive(torch="rsub", accepts_integers=True)
def rsub(xp: Namespace, input: Array, other: Array | float, *, alpha: float = 1.0) -> Array:
    """other - alpha * input"""
    return other - (input if alpha == 1.0 else alpha * input)


rsub.vjp("input")(lambda xp, g, alpha: -alpha * g)

rsub.vjp("other")(lambda xp, g: g)

elementwise_kernel(rsub, "other - alpha * input", input="-alpha * g", other="g")


@primitive(torch="mul", accepts_integers=True)
def mul(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input * other"""
    return input * other


mul.vjp("input")(lambda xp, g, other: g * other)

mul.vjp("other")(lambda xp, g, input: g * input)

elementwise_kernel(mul)


@primitive(torch="div", accepts_integers=True)
def div(xp: Namespace, input: Array, other: Array | float, *, rounding_mode: str | None = None) -> Array:
    """input / other; rounded down with rounding_mode="floor", towards zero with "trunc" """
    if rounding_mode not in (None, "floor", "trunc"):
        raise ValueError(f"div: expected rounding_mode None, 'floor' or 'trunc', got {rounding_mode!r}")
    if rounding_mode is None:
        return input / other
    whole = not is_float(input.dtype) and not (
        is_float(other.dtype) if hasattr(other, "dtype") else isinstance(other, float)
    )
    if whole and is_numpy(xp) and not np.all(other):
        raise ZeroDivisionError(f"div: whole numbers divided by zero with rounding_mode={rounding_mode!r}")
    if rounding_mode == "trunc" and not whole:
        return xp.trunc(input / other)
    quotient = xp.floor_divide(input, other)
    return quotient + ((quotient < 0) & (quotient * other != input)) if rounding_mode == "trunc" else quotient


div.vjp("input")(lambda xp, g, other, rounding_mode: g / other if rounding_mode is None else xp.zeros_like(g))


@div.vjp("other")
def _(xp: Namespace, g: Array, input: Array, other: Array, rounding_mode: str | None) -> Array:
    return -g * (input / other) / other if rounding_mode is None else xp.zeros_like(g)


elementwise_kernel(
    div,
    "input / other",
    when=lambda rounding_mode: rounding_mode is None or "only the plain quotient",
    input="g / other",
    other="-g * (input / other) / other",
)

div.errors(
    ErrorSample(sample((2,), (2,), rounding_mode="up"), ValueError, "'floor' or 'trunc', got 'up'"),
    ErrorSample(sample(integers(3, 2), 0, rounding_mode="floor"), ZeroDivisionError, "whole numbers divided by zero"),
)

mul.samples(*OF_TWO)

for _op in (add, sub, rsub, mul):
    _op.errors(NOT_BROADCAST)

for _op in (add, sub, rsub):
    _op.samples(*OF_TWO, sample((2, 3), (3,), alpha=0.5))

div.samples(
    *OF_TWO,
    sample((4, 3), apart(3), rounding_mode="floor"),
    sample((4, 3), apart(3), rounding_mode="trunc"),
    sample(Values((5, 3), -9, 9, kind="int"), Values((3,), -5, 0, kind="int"), rounding_mode="trunc"),
    sample(Values((5, 3), -9, 9, kind="int"), apart(3), rounding_mode="trunc"),
)


@primitive(torch="pow", accepts_integers=True)
def pow(xp: Namespace, input: Array | float, exponent: Array | float) -> Array:
    """input ** exponent"""
    return _whole(input, exponent) ** _whole(exponent, input)


def _whole(x: Any, other: Any = None) -> Any:
    """Returns truth values as whole numbers, the other's kind or int64: a power of them is a byte to NumPy."""
    if not hasattr(x, "dtype") or x.dtype != bool:
        return x
    return x.astype(other.dtype if hasattr(other, "dtype") and other.dtype.kind in "iu" else "int64")


@pow.vjp("input")
def _(xp: Namespace, g: Array, input: Array, exponent: Array | float) -> Array:
    if hasattr(exponent, "dtype"):
        return xp.where(exponent == 0, 0.0, g * exponent * input ** xp.where(exponent == 0, 1.0, exponent - 1))
    return g * exponent * input ** (exponent - 1) if exponent != 0 else xp.zeros_like(g)


@pow.vjp("exponent")
def _(xp: Namespace, g: Array, input: Array | float, exponent: Array, out: Array) -> Array:
    if not hasattr(input, "dtype"):
        return g * out * (math.log(input) if input > 0 else math.nan) if input else xp.zeros_like(g)
    zero = (input == 0) & (exponent >= 0)
    return xp.where(zero, 0.0, g * out * xp.log(xp.where(zero, 1.0, input)))


def _square(exponent: Any) -> bool | str:
    return (not hasattr(exponent, "dtype") and exponent == 2.0) or "the exponent is not 2"


elementwise_kernel(pow, "input * input", when=_square, input="2.f * g * input")

elementwise_kernel(
    pow,
    "powf(input, exponent)",
    input="exponent == 0.f ? 0.f : g * exponent * powf(input, exponent - 1.f)",
    exponent="input == 0.f && exponent >= 0.f ? 0.f : g * out * logf(input)",
)

pow.errors(NOT_BROADCAST)

pow.samples(
    sample(positive(2, 3), 1.5),
    sample((2, 3), 2),
    sample((4,), 3),
    sample((4,), 0),
    sample(positive(2, 3), (3,)),
    sample(1.7, (2, 3)),
)

neg = unary("neg", "-input", lambda xp, input: -input, lambda xp, g: -g, integers=True)

abs = unary(
    "abs",
    "|input|; the gradient at zero is zero",
    lambda xp, input: xp.abs(input),
    lambda xp, g, input: g * xp.sign(input),
    integers=True,
    make=apart,
)

square = unary(
    "square",
    "input * input",
    lambda xp, input: _whole(input) * _whole(input),
    lambda xp, g, input: 2.0 * g * input,
    integers=True,
)

reciprocal = unary(
    "reciprocal", "1 / input", lambda xp, input: 1.0 / input, lambda xp, g, out: -g * out * out, make=apart
)


@primitive(torch="lerp")
def lerp(xp: Namespace, input: Array, end: Array, weight: Array | float) -> Array:
    """input + weight * (end - input), reckoned from the nearer end, so that weight 1 gives end exactly"""
    rest = end - input
    if not hasattr(weight, "dtype"):
        return input + weight * rest if weight < 0.5 else end - rest * (1.0 - weight)
    return xp.where(xp.abs(weight) < 0.5, input + weight * rest, end - rest * (1.0 - weight))


lerp.vjp("input")(lambda xp, g, weight: g * (1.0 - weight))

lerp.vjp("end")(lambda xp, g, weight: g * weight)

lerp.vjp("weight")(lambda xp, g, input, end: g * (end - input))

_LERP = "fabsf(weight) < 0.5f ? input + weight * (end - input) : end - (end - input) * (1.f - weight)"


def _number(weight: Array | float) -> bool | str:
    return not hasattr(weight, "dtype") or "the weight is a tensor"


@lerp.cuda_vjp("generated", "input", when=lambda input, end, weight: floating(input, end) or _number(weight))
def _(k: Launcher, g: Array, weight: float, input_shape: Shape) -> Array:
    return broadcast_grad(k, "g * rest", {"g": g, "rest": 1.0 - weight}, input_shape)  # 1 - weight, rounded once


elementwise_kernel(lerp, _LERP, input="g * (1.f - weight)", end="g * weight", weight="g * (end - input)")

lerp.errors(
    ErrorSample(sample((2, 3), (4,), 0.5), ShapeError, r"lerp: the shapes of input \(2, 3\), end \(4,\) do not")
)

lerp.samples(
    sample((3, 4), (3, 4), 0.3),
    sample((3, 4), (4,), 1.2),
    sample((3, 1), (4,), (3, 4)),
    sample((3, 1), (3, 4), 0.25),
    sample((4,), (3, 4), 0.25),
    sample((), (1, 3), 0.25),
)

add.perf_samples(
    sample((4097, 1283), (4097, 1283)),
    sample((3, 70, 640), (640,), alpha=0.5),
    sample((70, 640), (70, 1)),
    sample((61, 33, 77), (61, 1, 77)),
)


@primitive(torch="addcmul", accepts_integers=True)
def addcmul(xp: Namespace, input: Array, tensor1: Array, tensor2: Array, *, value: float = 1) -> Array:
    """input + value * tensor1 * tensor2

    Args:
        input, tensor1, tensor2: they broadcast.
        value: the factor.

    Returns:
        In the shape to which they broadcast.
    """
    return input + value * tensor1 * tensor2


addcmul.vjp("input")(lambda xp, g: g)

addcmul.vjp("tensor1")(lambda xp, g, tensor2, value: g * value * tensor2)

addcmul.vjp("tensor2")(lambda xp, g, tensor1, value: g * value * tensor1)

elementwise_kernel(
    addcmul,
    "input + value * tensor1 * tensor2",
    input="g",
    tensor1="g * value * tensor2",
    tensor2="g * value * tensor1",
)

addcmul.perf_samples(sample((1280, 1280), (1280, 1280), (1280, 1280), value=0.25))

addcmul.samples(sample((2, 3), (2, 3), (2, 3)), sample((3, 1), (4,), (3, 4), value=-0.5), sample((0, 2), (2,), (1,)))

for _op in (addcmul,):
    _op.errors(ErrorSample(sample((2, 3), (4,), (1,)), ShapeError, "do not broadcast together"))
