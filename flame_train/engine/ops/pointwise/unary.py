"""Functions of one tensor, value by value. Names and meaning as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...dtype import Array, bool_
from ...namespace import Namespace
from ...op import Op, primitive
from ...op_samples import of_one, positive
from ..common.elementwise_codegen import elementwise_kernel


def unary(
    name: str,
    doc: str,
    value: Callable[..., Array],
    gradient: Callable[..., Array] | None = None,
    *,
    kernel: tuple[str, str] | None = None,
    torch: str | None = "",
    integers: bool = False,
    make: Callable[..., Any] = lambda *shape: shape,
) -> Op:
    """Returns an op of one tensor, value by value, with its gradient, its kernels and its samples.

    Args:
        name: the op's, and of its counterpart in PyTorch unless `torch` names another, or None.
        doc: its formula.
        value: the reference, `value(xp, input)`.
        gradient: `gradient(xp, g, input)` or `gradient(xp, g, out)`; without one the op has no gradient.
        kernel: both in C, where the code that these two would become is less accurate or slower.
        torch: see `name`.
        integers: whether it takes integers and booleans as they are.
        make: what makes a sample's values, as `of_one` takes it.
    """

    def reference(xp: Namespace, input: Array) -> Array:
        return value(xp, input)

    reference.__name__, reference.__doc__ = name, doc
    op = primitive(torch=name if torch == "" else torch, accepts_integers=integers)(reference)
    if gradient is None:
        op.non_differentiable("input")
        elementwise_kernel(op, result=bool_, booleans=True)
    else:
        op.vjp("input")(gradient)
        elementwise_kernel(op, kernel[0], input=kernel[1]) if kernel else elementwise_kernel(op)
    op.samples(*of_one(make))
    return op


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
