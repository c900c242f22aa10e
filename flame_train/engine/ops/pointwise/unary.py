"""Functions of one tensor, value by value. Names and meaning as in PyTorch."""

from __future__ import annotations

import math

from ...dtype import Array, is_float
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import positive
from ..common import special
from ..common.elementwise_codegen import elementwise_kernel
from .declare import unary

exp = unary("exp", "e ** input", lambda xp, input: xp.exp(input), lambda xp, g, out: g * out)
expm1 = unary(
    "expm1", "e ** input - 1, exact near zero", lambda xp, input: xp.expm1(input), lambda xp, g, out: g * (out + 1.0)
)
log = unary(
    "log",
    "The natural logarithm of input",
    lambda xp, input: xp.log(input),
    lambda xp, g, input: g / input,
    make=positive,
)
log1p = unary(
    "log1p",
    "The natural logarithm of 1 + input, exact near zero",
    lambda xp, input: xp.log1p(input),
    lambda xp, g, input: g / (input + 1.0),
    make=positive,
)
sqrt = unary(
    "sqrt",
    "The square root of input",
    lambda xp, input: xp.sqrt(input),
    lambda xp, g, out: g / (2.0 * out),
    make=positive,
)
rsqrt = unary(
    "rsqrt",
    "1 / sqrt(input)",
    lambda xp, input: 1.0 / xp.sqrt(input),
    lambda xp, g, out: -0.5 * g * out * out * out,
    kernel=("rsqrtf(input)", "-0.5f * g * out * out * out"),
    make=positive,
)
sin = unary(
    "sin", "The sine of input, in radians", lambda xp, input: xp.sin(input), lambda xp, g, input: g * xp.cos(input)
)
cos = unary(
    "cos", "The cosine of input, in radians", lambda xp, input: xp.cos(input), lambda xp, g, input: -g * xp.sin(input)
)
tanh = unary(
    "tanh",
    "The hyperbolic tangent of input",
    lambda xp, input: xp.tanh(input),
    lambda xp, g, out: g * (1.0 - out * out),
)


def sigmoid_value(xp: Namespace, x: Array) -> Array:
    """1 / (1 + e^-x), as accurate near 0 as near 1, and 0 where e^-x overflows."""
    return 1.0 / (1.0 + xp.exp(-x))


sigmoid = unary(
    "sigmoid",
    "1 / (1 + exp(-input))",
    sigmoid_value,
    lambda xp, g, out: g * out * (1.0 - out),
    kernel=("sigmoid(input)", "g * out * (1.f - out)"),
)
erf = unary(
    "erf",
    "2 / sqrt(pi) * integral of exp(-t^2) from 0 to input",
    special.erf,
    lambda xp, g, input: g * (2.0 / math.sqrt(math.pi)) * xp.exp(-input * input),
    kernel=("erff(input)", "g * 1.1283791670955126f * e_to(-input * input)"),
)


def _zero(xp: Namespace, g: Array) -> Array:
    return xp.zeros_like(g)


floor, ceil, trunc = (
    unary(name, f"{doc}; the gradient is zero", lambda xp, x, name=name: getattr(xp, name)(x), _zero, integers=True)
    for name, doc in (
        ("floor", "The largest whole number not above input"),
        ("ceil", "The smallest whole number not below input"),
        ("trunc", "input without its fraction"),
    )
)


@primitive(torch="round", accepts_integers=True)
def round(xp: Namespace, input: Array, *, decimals: int = 0) -> Array:
    """The nearest number of so many decimals, of two equally near the even one; the gradient is zero"""
    if decimals == 0:
        return xp.rint(input) if is_float(input.dtype) else input.copy()
    scale = 10.0 ** (-decimals if decimals < 0 else decimals)
    return xp.rint(input / scale) * scale if decimals < 0 else xp.rint(input * scale) / scale


round.vjp("input")(_zero)
elementwise_kernel(round, "rintf(input)", input="0.f", when=lambda decimals: decimals == 0 or "only whole numbers")
round.samples(sample((3, 5)), sample((7,), decimals=2), sample((7,), decimals=-1))
