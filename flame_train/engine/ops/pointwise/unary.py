"""Functions of one tensor, value by value. Names and meaning as in PyTorch."""

from __future__ import annotations

from ...dtype import Array
from ...namespace import Namespace
from ...op_samples import positive
from .declare import unary

exp = unary("exp", "e ** input", lambda xp, input: xp.exp(input), lambda xp, g, out: g * out)

log = unary(
    "log",
    "The natural logarithm of input",
    lambda xp, input: xp.log(input),
    lambda xp, g, input: g / input,
    make=positive,
)

sqrt = unary(
    "sqrt",
    "The square root of input",
    lambda xp, input: xp.sqrt(input),
    lambda xp, g, out: g / (2.0 * out),
    make=positive,
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

ceil = unary(
    "ceil",
    "The smallest whole number not below input; the gradient is zero",
    lambda xp, input: xp.ceil(input),
    lambda xp, g: xp.zeros_like(g),
    integers=True,
)
