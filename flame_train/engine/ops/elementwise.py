"""Elementwise arithmetic, comparisons and activations. Names, defaults and meaning as in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dtype import Array, DType
from ..op import Op, Sample, primitive, sample
from ..sample import apart, booleans, positive
from . import conditions, special


def _binary_samples(op: Op) -> None:
    @op.samples
    def _() -> Iterator[Sample]:
        yield sample((2, 3), apart(2, 3))
        yield sample((4, 1, 3), apart(5, 1))
        yield sample((3,), 1.7)
        yield sample((0, 3), apart(0, 3))


def _unary_samples(op: Op, make: Any = lambda *shape: shape) -> None:
    @op.samples
    def _() -> Iterator[Sample]:
        yield sample(make(3, 5))
        yield sample(make(1))
        yield sample(make(0, 2))


# ---- arithmetic ----------------------------------------------------------------------------------------


@primitive(torch="add")
def add(xp: Any, input: Array, other: Array | float, *, alpha: float = 1.0) -> Array:
    """input + alpha * other"""
    return input + other if alpha == 1.0 else input + alpha * other


@add.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


@add.vjp("other")
def _(xp: Any, g: Array, alpha: float) -> Array:
    return g if alpha == 1.0 else alpha * g


@primitive(torch="sub")
def sub(xp: Any, input: Array, other: Array | float, *, alpha: float = 1.0) -> Array:
    """input - alpha * other"""
    return input - other if alpha == 1.0 else input - alpha * other


@sub.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


@sub.vjp("other")
def _(xp: Any, g: Array, alpha: float) -> Array:
    return -alpha * g


def _one_pass(input: Array, other: Any, alpha: float) -> str:
    """CuPy adds 16-bit floats in fp32 and rounds once, in one pass: what the reference does in four."""
    if alpha != 1.0 or not hasattr(other, "dtype"):
        return "only a plain sum of two arrays"
    return conditions.same(conditions.LOW, input, other)


@add.cuda("one pass", when=_one_pass)
def _(k: Any, input: Array, other: Array, alpha: float) -> Array:
    return k.xp.add(input, other)


@primitive(torch="rsub")
def rsub(xp: Any, input: Array, other: Array | float) -> Array:
    """other - input"""
    return other - input


@rsub.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return -g


@rsub.vjp("other")
def _(xp: Any, g: Array) -> Array:
    return g


@primitive(torch="mul")
def mul(xp: Any, input: Array, other: Array | float) -> Array:
    """input * other"""
    return input * other


@mul.vjp("input")
def _(xp: Any, g: Array, other: Array) -> Array:
    return g * other


@mul.vjp("other")
def _(xp: Any, g: Array, input: Array) -> Array:
    return g * input


@primitive(torch="div")
def div(xp: Any, input: Array, other: Array | float) -> Array:
    """input / other"""
    return input / other


@div.vjp("input")
def _(xp: Any, g: Array, other: Array) -> Array:
    return g / other


@div.vjp("other")
def _(xp: Any, g: Array, input: Array, other: Array) -> Array:
    return -g * input / (other * other)


for _op in (add, sub, rsub, mul, div):
    _binary_samples(_op)


@primitive(torch="pow")
def pow(xp: Any, input: Array, exponent: float) -> Array:
    """input ** exponent, for a number as exponent"""
    return input**exponent


@pow.vjp("input")
def _(xp: Any, g: Array, input: Array, exponent: float) -> Array:
    return g * exponent * input ** (exponent - 1) if exponent != 0 else xp.zeros_like(g)


@pow.samples
def _() -> Iterator[Sample]:
    yield sample(positive(2, 3), 1.5)
    yield sample((2, 3), 2)
    yield sample((4,), 3)
    yield sample((4,), 0)


@primitive(torch="neg")
def neg(xp: Any, input: Array) -> Array:
    """-input"""
    return -input


@neg.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return -g


@primitive(torch="abs")
def abs(xp: Any, input: Array) -> Array:
    """|input|; the gradient at zero is zero"""
    return xp.abs(input)


@abs.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    return g * xp.sign(input)


@primitive(torch="square")
def square(xp: Any, input: Array) -> Array:
    """input * input"""
    return input * input


@square.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    return 2.0 * g * input


@primitive(torch="exp")
def exp(xp: Any, input: Array) -> Array:
    """e ** input"""
    return xp.exp(input)


@exp.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return g * out


@primitive(torch="log")
def log(xp: Any, input: Array) -> Array:
    """The natural logarithm of input"""
    return xp.log(input)


@log.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    return g / input


@primitive(torch="sqrt")
def sqrt(xp: Any, input: Array) -> Array:
    """The square root of input"""
    return xp.sqrt(input)


@sqrt.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return g / (2.0 * out)


@primitive(torch="rsqrt")
def rsqrt(xp: Any, input: Array) -> Array:
    """1 / sqrt(input)"""
    return 1.0 / xp.sqrt(input)


@rsqrt.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return -0.5 * g * out * out * out


@primitive(torch="reciprocal")
def reciprocal(xp: Any, input: Array) -> Array:
    """1 / input"""
    return 1.0 / input


@reciprocal.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return -g * out * out


@primitive(torch="sin")
def sin(xp: Any, input: Array) -> Array:
    """The sine of input, in radians"""
    return xp.sin(input)


@sin.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    return g * xp.cos(input)


@primitive(torch="cos")
def cos(xp: Any, input: Array) -> Array:
    """The cosine of input, in radians"""
    return xp.cos(input)


@cos.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    return -g * xp.sin(input)


@primitive(torch="tanh")
def tanh(xp: Any, input: Array) -> Array:
    """The hyperbolic tangent of input"""
    return xp.tanh(input)


@tanh.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return g * (1.0 - out * out)


def _sigmoid(xp: Any, x: Array) -> Array:
    """1 / (1 + e^-x) by way of tanh, which neither overflows nor branches."""
    return 0.5 * (1.0 + xp.tanh(0.5 * x))


@primitive(torch="sigmoid")
def sigmoid(xp: Any, input: Array) -> Array:
    """1 / (1 + exp(-input))"""
    return _sigmoid(xp, input)


@sigmoid.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return g * out * (1.0 - out)


for _op in (neg, square, exp, sin, cos, tanh, sigmoid):
    _unary_samples(_op)
for _op in (log, sqrt, rsqrt):
    _unary_samples(_op, positive)
for _op in (abs, reciprocal):
    _unary_samples(_op, apart)


@primitive(torch="clamp")
def clamp(xp: Any, input: Array, min: float | None = None, max: float | None = None) -> Array:
    """input limited to [min, max]; the gradient passes where input lies inside, bounds included"""
    return xp.clip(input, min, max)


@clamp.vjp("input")
def _(xp: Any, g: Array, input: Array, min: float | None, max: float | None) -> Array:
    inside = xp.ones(input.shape, bool)
    if min is not None:
        inside &= input >= min
    if max is not None:
        inside &= input <= max
    return xp.where(inside, g, 0.0)


@clamp.samples
def _() -> Iterator[Sample]:
    yield sample((3, 4), -0.5, 0.7)
    yield sample((3, 4), min=0.3)
    yield sample((5,), max=-0.2)


@primitive(torch="maximum")
def maximum(xp: Any, input: Array, other: Array) -> Array:
    """The larger of each pair; a tie shares the gradient evenly"""
    return xp.maximum(input, other)


@maximum.vjp("input")
def _(xp: Any, g: Array, input: Array, other: Array) -> Array:
    return xp.where(input > other, g, xp.where(input == other, 0.5 * g, 0.0))


@maximum.vjp("other")
def _(xp: Any, g: Array, input: Array, other: Array) -> Array:
    return xp.where(other > input, g, xp.where(input == other, 0.5 * g, 0.0))


@primitive(torch="minimum")
def minimum(xp: Any, input: Array, other: Array) -> Array:
    """The smaller of each pair; a tie shares the gradient evenly"""
    return xp.minimum(input, other)


@minimum.vjp("input")
def _(xp: Any, g: Array, input: Array, other: Array) -> Array:
    return xp.where(input < other, g, xp.where(input == other, 0.5 * g, 0.0))


@minimum.vjp("other")
def _(xp: Any, g: Array, input: Array, other: Array) -> Array:
    return xp.where(other < input, g, xp.where(input == other, 0.5 * g, 0.0))


for _op in (maximum, minimum):

    @_op.samples
    def _() -> Iterator[Sample]:
        yield sample((3, 4), (3, 4))
        yield sample((2, 1, 4), (3, 1))


@primitive(torch="where")
def where(xp: Any, condition: Array, input: Array | float, other: Array | float) -> Array:
    """input where condition holds, else other"""
    return xp.where(condition, input, other)


where.nograd("condition")


@where.vjp("input")
def _(xp: Any, g: Array, condition: Array) -> Array:
    return xp.where(condition, g, 0.0)


@where.vjp("other")
def _(xp: Any, g: Array, condition: Array) -> Array:
    return xp.where(condition, 0.0, g)


@where.samples
def _() -> Iterator[Sample]:
    yield sample(booleans(3, 4), (3, 4), (3, 4))
    yield sample(booleans(4), (3, 4), 0.0)
    yield sample(booleans(3, 4), (1, 4), (3, 1))


# ---- comparisons (no gradient) -------------------------------------------------------------------------


@primitive(torch="lt")
def lt(xp: Any, input: Array, other: Array | float) -> Array:
    """input < other"""
    return input < other


@primitive(torch="le")
def le(xp: Any, input: Array, other: Array | float) -> Array:
    """input <= other"""
    return input <= other


@primitive(torch="gt")
def gt(xp: Any, input: Array, other: Array | float) -> Array:
    """input > other"""
    return input > other


@primitive(torch="ge")
def ge(xp: Any, input: Array, other: Array | float) -> Array:
    """input >= other"""
    return input >= other


@primitive(torch="eq")
def eq(xp: Any, input: Array, other: Array | float) -> Array:
    """input == other"""
    return input == other


for _op in (lt, le, gt, ge, eq):
    _op.nograd("input", "other")
    _binary_samples(_op)


@primitive(torch="isfinite")
def isfinite(xp: Any, input: Array) -> Array:
    """True where input is neither infinite nor NaN"""
    return xp.isfinite(input)


isfinite.nograd("input")
_unary_samples(isfinite)


# ---- activations ---------------------------------------------------------------------------------------


@primitive(torch="nn.functional.relu")
def relu(xp: Any, input: Array) -> Array:
    """max(input, 0); the gradient at zero is zero"""
    return xp.maximum(input, 0.0)


@relu.vjp("input")
def _(xp: Any, g: Array, out: Array) -> Array:
    return xp.where(out > 0, g, 0.0)


_unary_samples(relu, apart)


@primitive(torch="nn.functional.silu")
def silu(xp: Any, input: Array) -> Array:
    """input * sigmoid(input)"""
    return input * _sigmoid(xp, input)


@silu.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    s = _sigmoid(xp, input)
    return g * s * (1.0 + input * (1.0 - s))


_unary_samples(silu)


@primitive(torch=None)
def quick_gelu(xp: Any, input: Array) -> Array:
    """input * sigmoid(1.702 * input), the activation of OpenAI's CLIP (its `QuickGELU`)"""
    return input * _sigmoid(xp, 1.702 * input)


@quick_gelu.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    s = _sigmoid(xp, 1.702 * input)
    return g * s * (1.0 + 1.702 * input * (1.0 - s))


_unary_samples(quick_gelu)


_INV_SQRT2 = 1.0 / math.sqrt(2.0)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@primitive(torch="erf")
def erf(xp: Any, input: Array) -> Array:
    """2 / sqrt(pi) * integral of exp(-t^2) from 0 to input"""
    return special.erf(xp, input)


@erf.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    return g * (2.0 / math.sqrt(math.pi)) * xp.exp(-input * input)


_unary_samples(erf)


@primitive(torch="nn.functional.gelu")
def gelu(xp: Any, input: Array, approximate: str = "none") -> Array:
    """input * Phi(input); with approximate="tanh" Hendrycks and Gimpel's formula (arXiv 1606.08415)"""
    return input * _phi(xp, input, approximate)


@gelu.vjp("input")
def _(xp: Any, g: Array, input: Array, approximate: str) -> Array:
    return g * gelu_slope(xp, input, approximate)


@gelu.samples
def _() -> Iterator[Sample]:
    yield sample((3, 5))
    yield sample((3, 5), "tanh")
    yield sample((0,))


def _tanh_argument(x: Array) -> Array:
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)


def _phi(xp: Any, x: Array, approximate: str) -> Array:
    """The normal distribution function, exact or by tanh."""
    if approximate == "tanh":
        return 0.5 * (1.0 + xp.tanh(_tanh_argument(x)))
    if approximate != "none":
        raise ValueError(f"gelu: expected approximate='none' or 'tanh', got {approximate!r}")
    return 0.5 * (1.0 + special.erf(xp, x * _INV_SQRT2))


def gelu_slope(xp: Any, x: Array, approximate: str) -> Array:
    """d gelu(x) / dx"""
    if approximate == "tanh":
        t = xp.tanh(_tanh_argument(x))
        inner = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    return gelu_value_and_slope(xp, x)[1]


def gelu_value_and_slope(xp: Any, x: Array) -> tuple[Array, Array]:
    """The exact gelu and its derivative, which share the costly part."""
    phi = _phi(xp, x, "none")
    return x * phi, phi + x * _INV_SQRT_2PI * xp.exp(-0.5 * x * x)


def gelu_value(xp: Any, x: Array) -> Array:
    """The exact gelu of an array, for ops that contain it."""
    return x * _phi(xp, x, "none")


# ---- casting -------------------------------------------------------------------------------------------


@primitive(torch=None, moves=True)
def cast(xp: Any, input: Array, dtype: DType) -> Array:
    """input in another dtype (torch's Tensor.to(dtype)); the gradient is cast back"""
    return input.astype(dtype)


@cast.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


@cast.samples
def _() -> Iterator[Sample]:
    yield sample((3, 4), np.dtype(np.float64))


@primitive(torch="clone", moves=True)
def clone(xp: Any, input: Array) -> Array:
    """A copy of input in row-major memory"""
    return xp.array(input, order="C", copy=True)


@clone.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


_unary_samples(clone)
