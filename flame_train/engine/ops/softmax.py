"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dtype import Array
from ..op import Sample, primitive, sample


@primitive(torch="nn.functional.softmax")
def softmax(xp: Any, input: Array, dim: int) -> Array:
    """exp(input) / sum(exp(input)) along dim, computed from input - max(input)"""
    e = xp.exp(input - xp.max(input, axis=dim, keepdims=True))
    return e / xp.sum(e, axis=dim, keepdims=True)


@softmax.vjp("input")
def _(xp: Any, g: Array, out: Array, dim: int) -> Array:
    return out * (g - xp.sum(g * out, axis=dim, keepdims=True))


@primitive(torch="nn.functional.log_softmax")
def log_softmax(xp: Any, input: Array, dim: int) -> Array:
    """input - log(sum(exp(input))) along dim, computed from input - max(input)"""
    shifted = input - xp.max(input, axis=dim, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=dim, keepdims=True))


@log_softmax.vjp("input")
def _(xp: Any, g: Array, out: Array, dim: int) -> Array:
    return g - xp.exp(out) * xp.sum(g, axis=dim, keepdims=True)


for _op in (softmax, log_softmax):

    @_op.samples
    def _() -> Iterator[Sample]:
        yield sample((2, 3, 5), -1)
        yield sample((4, 3), 0)
        yield sample((3, 1), 1)
