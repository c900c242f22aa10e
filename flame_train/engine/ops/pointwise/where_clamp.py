"""Choosing between values: limits, extremes of pairs, and `where`."""

from __future__ import annotations

import math

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import Values, booleans
from ..common.elementwise_codegen import elementwise_kernel


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


def _limited(min: Array | float | None, max: Array | float | None) -> bool | str:
    return min is not None or max is not None or "neither min nor max"


elementwise_kernel(
    clamp,
    "smaller(larger(input, min), max)",
    when=_limited,
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
