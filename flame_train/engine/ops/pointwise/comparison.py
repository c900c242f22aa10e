"""Comparisons and logic. The results are true or false, so there are no gradients."""

from __future__ import annotations

from ...dtype import Array, bool_
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import NOT_BROADCAST, OF_TWO, booleans
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
