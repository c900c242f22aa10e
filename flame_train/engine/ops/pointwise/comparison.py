"""Comparisons and logic, whose results have no gradients, and choices between values: limits and `where`."""

from __future__ import annotations

import math

from ....errors import ShapeError
from ...dtype import Array, bool_
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import NOT_BROADCAST, OF_TWO, Values, booleans
from ..common.elementwise_codegen import elementwise_kernel
from .unary import unary


@primitive(torch="lt", rounds_scalars=True)
def lt(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input < other"""
    return input < other


@primitive(torch="le", rounds_scalars=True)
def le(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input <= other"""
    return input <= other


@primitive(torch="gt", rounds_scalars=True)
def gt(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input > other"""
    return input > other


@primitive(torch="ge", rounds_scalars=True)
def ge(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input >= other"""
    return input >= other


@primitive(torch="eq", rounds_scalars=True)
def eq(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input == other"""
    return input == other


@primitive(torch="ne", rounds_scalars=True)
def ne(xp: Namespace, input: Array, other: Array | float) -> Array:
    """input != other"""
    return input != other


for _op in (lt, le, gt, ge, eq, ne):
    _op.non_differentiable("input", "other")
    _op.samples(*OF_TWO)
    _op.errors(NOT_BROADCAST)
    elementwise_kernel(_op, result=bool_)


@primitive(torch="logical_and")
def logical_and(xp: Namespace, input: Array, other: Array) -> Array:
    """True where both are true; a number is true if it is not zero"""
    return xp.logical_and(input, other)


@primitive(torch="logical_or")
def logical_or(xp: Namespace, input: Array, other: Array) -> Array:
    """True where one or both are true"""
    return xp.logical_or(input, other)


@primitive(torch="logical_xor")
def logical_xor(xp: Namespace, input: Array, other: Array) -> Array:
    """True where exactly one is true"""
    return xp.logical_xor(input, other)


for _op, _formula in (
    (logical_and, "input != 0.f && other != 0.f"),
    (logical_or, "input != 0.f || other != 0.f"),
    (logical_xor, "(input != 0.f) != (other != 0.f)"),
):
    _op.non_differentiable("input", "other")
    _op.errors(NOT_BROADCAST)
    elementwise_kernel(_op, _formula, result=bool_, booleans=True)

    _op.samples(sample(booleans(3, 4), booleans(3, 4)), sample(booleans(3, 4), (4,)))
    _op.perf_samples(sample(booleans(70, 129), booleans(70, 129)), sample(booleans(3, 70, 64), booleans(70, 64)))

logical_not = unary("logical_not", "True where input is false or zero", lambda xp, input: xp.logical_not(input))

isfinite = unary("isfinite", "True where input is neither infinite nor NaN", lambda xp, input: xp.isfinite(input))


@primitive(torch="clamp", accepts_integers=True, rounds_scalars=True)
def clamp(xp: Namespace, input: Array, min: Array | float | None = None, max: Array | float | None = None) -> Array:
    """input limited to [min, max]; the gradient passes where input lies inside, bounds included"""
    if min is None and max is None:
        raise ValueError("clamp: expected min, max or both, got neither")
    return xp.clip(input, min, max)


@clamp.vjp("input")
def _(xp: Namespace, g: Array, input: Array, min: Array | float | None, max: Array | float | None) -> Array:
    inside = xp.ones(g.shape, bool)
    if min is not None:
        inside &= input >= min
    if max is not None:
        inside &= input <= max
    return xp.where(inside, g, 0.0)


@clamp.vjp("min")
def _(xp: Namespace, g: Array, input: Array, min: Array, max: Array | float | None) -> Array:
    below = input < min
    return xp.where(below if max is None else below & (min < max), g, 0.0)


@clamp.vjp("max")
def _(xp: Namespace, g: Array, input: Array, min: Array | float | None, max: Array) -> Array:
    above = input > max
    return xp.where(above if min is None else above | (max < min), g, 0.0)


clamp.samples(
    sample((3, 4), -0.5, 0.7),
    sample((3, 4), min=0.3),
    sample((5,), max=-0.2),
    sample((3, 4), Values((4,), -1.0, 0.0), Values((3, 1), 0.0, 1.0)),
    sample((3, 1), (3, 4)),
    sample((3, 4), None, (3, 4)),
)

clamp.errors(ErrorSample(sample((2,)), ValueError, "expected min, max or both"))


elementwise_kernel(
    clamp,
    "smaller(larger(input, min), max)",
    when=lambda min, max: min is not None or max is not None or "neither min nor max",
    missing={"min": -math.inf, "max": math.inf},
    input="input >= min && input <= max ? g : 0.f",
    min="input < min && min < max ? g : 0.f",
    max="input > max || max < min ? g : 0.f",
)


@primitive(torch="where", accepts_integers=True)
def where(xp: Namespace, condition: Array, input: Array | float, other: Array | float) -> Array:
    """input where condition holds, else other"""
    if condition.dtype != bool:
        raise ShapeError(f"where: expected a boolean condition, got {condition.dtype.name}")
    return xp.where(condition, input, other)


where.non_differentiable("condition")

where.vjp("input")(lambda xp, g, condition: xp.where(condition, g, 0.0))

where.vjp("other")(lambda xp, g, condition: xp.where(condition, 0.0, g))

elementwise_kernel(
    where,
    "condition != 0.f ? input : other",
    when=lambda condition: condition.dtype == bool or "it is refused",
    input="condition != 0.f ? g : 0.f",
    other="condition != 0.f ? 0.f : g",
)

where.errors(
    ErrorSample(sample(booleans(2), (3,), 0.0), ShapeError, r"of condition \(2,\), input \(3,\) do not broadcast"),
    ErrorSample(sample((2,), (2,), 0.0), ShapeError, "expected a boolean condition, got float64"),
)

where.samples(
    sample(booleans(3, 4), (3, 4), (3, 4)), sample(booleans(4), (3, 4), 0.0), sample(booleans(3, 4), (1, 4), (3, 1))
)
