"""Functions of one tensor, value by value. Names and meaning as in PyTorch."""

from __future__ import annotations

import math

from ...dtype import Array, is_float
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import of_one, positive
from ..common import special
from ..common.elementwise_codegen import elementwise_kernel


@primitive(torch="exp")
def exp(xp: Namespace, input: Array) -> Array:
    """e ** input"""
    return xp.exp(input)


exp.vjp("input")(lambda xp, g, out: g * out)


elementwise_kernel(exp, "e_to(input)", input="g * out")


@primitive(torch="expm1")
def expm1(xp: Namespace, input: Array) -> Array:
    """e ** input - 1, exact near zero"""
    return xp.expm1(input)


expm1.vjp("input")(lambda xp, g, out: g * (out + 1.0))


elementwise_kernel(expm1, "expm1f(input)", input="g * (out + 1.f)")


@primitive(torch="log")
def log(xp: Namespace, input: Array) -> Array:
    """The natural logarithm of input"""
    return xp.log(input)


log.vjp("input")(lambda xp, g, input: g / input)


elementwise_kernel(log, "logf(input)", input="g / input")


@primitive(torch="log1p")
def log1p(xp: Namespace, input: Array) -> Array:
    """The natural logarithm of 1 + input, exact near zero"""
    return xp.log1p(input)


log1p.vjp("input")(lambda xp, g, input: g / (input + 1.0))


elementwise_kernel(log1p, "log1pf(input)", input="g / (input + 1.f)")


@primitive(torch="sqrt")
def sqrt(xp: Namespace, input: Array) -> Array:
    """The square root of input"""
    return xp.sqrt(input)


sqrt.vjp("input")(lambda xp, g, out: g / (2.0 * out))


elementwise_kernel(sqrt, "sqrtf(input)", input="g / (2.f * out)")


@primitive(torch="rsqrt")
def rsqrt(xp: Namespace, input: Array) -> Array:
    """1 / sqrt(input)"""
    return 1.0 / xp.sqrt(input)


rsqrt.vjp("input")(lambda xp, g, out: -0.5 * g * out * out * out)


elementwise_kernel(rsqrt, "rsqrtf(input)", input="-0.5f * g * out * out * out")


@primitive(torch="sin")
def sin(xp: Namespace, input: Array) -> Array:
    """The sine of input, in radians"""
    return xp.sin(input)


sin.vjp("input")(lambda xp, g, input: g * xp.cos(input))


elementwise_kernel(sin, "sinf(input)", input="g * cosf(input)")


@primitive(torch="cos")
def cos(xp: Namespace, input: Array) -> Array:
    """The cosine of input, in radians"""
    return xp.cos(input)


cos.vjp("input")(lambda xp, g, input: -g * xp.sin(input))


elementwise_kernel(cos, "cosf(input)", input="-g * sinf(input)")


@primitive(torch="tanh")
def tanh(xp: Namespace, input: Array) -> Array:
    """The hyperbolic tangent of input"""
    return xp.tanh(input)


tanh.vjp("input")(lambda xp, g, out: g * (1.0 - out * out))


elementwise_kernel(tanh, "tanhf(input)", input="g * (1.f - out * out)")


def sigmoid_value(xp: Namespace, x: Array) -> Array:
    """1 / (1 + e^-x), as accurate near 0 as near 1, and 0 where e^-x overflows."""
    return 1.0 / (1.0 + xp.exp(-x))


@primitive(torch="sigmoid")
def sigmoid(xp: Namespace, input: Array) -> Array:
    """1 / (1 + exp(-input))"""
    return sigmoid_value(xp, input)


sigmoid.vjp("input")(lambda xp, g, out: g * out * (1.0 - out))


elementwise_kernel(sigmoid, "sigmoid(input)", input="g * out * (1.f - out)")


@primitive(torch="erf")
def erf(xp: Namespace, input: Array) -> Array:
    """2 / sqrt(pi) * integral of exp(-t^2) from 0 to input"""
    return special.erf(xp, input)


erf.vjp("input")(lambda xp, g, input: g * (2.0 / math.sqrt(math.pi)) * xp.exp(-input * input))


elementwise_kernel(erf, "erff(input)", input="g * 1.1283791670955126f * e_to(-input * input)")


@primitive(torch="floor", accepts_integers=True)
def floor(xp: Namespace, input: Array) -> Array:
    """The largest whole number not above input; the gradient is zero"""
    return xp.floor(input)


@primitive(torch="ceil", accepts_integers=True)
def ceil(xp: Namespace, input: Array) -> Array:
    """The smallest whole number not below input; the gradient is zero"""
    return xp.ceil(input)


@primitive(torch="trunc", accepts_integers=True)
def trunc(xp: Namespace, input: Array) -> Array:
    """input without its fraction; the gradient is zero"""
    return xp.trunc(input)


@primitive(torch="round", accepts_integers=True)
def round(xp: Namespace, input: Array, *, decimals: int = 0) -> Array:
    """The nearest number of so many decimals, of two equally near the even one; the gradient is zero"""
    if decimals == 0:
        return xp.rint(input) if is_float(input.dtype) else input.copy()
    scale = 10.0 ** (-decimals if decimals < 0 else decimals)
    return xp.rint(input / scale) * scale if decimals < 0 else xp.rint(input * scale) / scale


for _op in (floor, ceil, trunc, round):
    _op.vjp("input")(lambda xp, g: xp.zeros_like(g))


elementwise_kernel(floor, "floorf(input)", input="0.f")
elementwise_kernel(ceil, "ceilf(input)", input="0.f")
elementwise_kernel(trunc, "truncf(input)", input="0.f")
elementwise_kernel(round, "rintf(input)", input="0.f", when=lambda decimals: decimals == 0 or "only whole numbers")
for _op in (exp, expm1, sin, cos, tanh, sigmoid, erf, floor, ceil, trunc):
    _op.samples(*of_one())
for _op in (log, log1p, sqrt, rsqrt):
    _op.samples(*of_one(positive))


round.samples(sample((3, 5)), sample((7,), decimals=2), sample((7,), decimals=-1))
