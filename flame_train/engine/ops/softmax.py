"""Softmax and its logarithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..sample import no_such_dim
from ..tensor import Tensor
from .dims import Dims, axes, spread


@primitive(torch="nn.functional.softmax")
def softmax(xp: Any, input: Array, dim: int) -> Array:
    """exp(input) / sum(exp(input)) along dim, computed from input - max(input)"""
    e = xp.exp(_shifted(xp, input, dim, "softmax"))
    return e / xp.sum(e, axis=axes(dim, input.ndim, "softmax"), keepdims=True)


def _shifted(xp: Any, x: Array, dim: int, op: str) -> Array:
    """x - max(x) along dim, so that no exponential overflows."""
    dims = axes(dim, x.ndim, op)
    return x - xp.max(x, axis=dims, keepdims=True) if x.size else x


@softmax.vjp("input")
def _(xp: Any, g: Array, out: Array, dim: int) -> Array:
    return out * (g - xp.sum(g * out, axis=axes(dim, g.ndim, "softmax"), keepdims=True))


@composite(torch="nn.functional.softmin")
def softmin(input: Tensor, dim: int) -> Tensor:
    """softmax(-input) along dim"""
    return softmax(-input, dim)


@primitive(torch="nn.functional.log_softmax")
def log_softmax(xp: Any, input: Array, dim: int) -> Array:
    """input - log(sum(exp(input))) along dim, computed from input - max(input)"""
    shifted = _shifted(xp, input, dim, "log_softmax")
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axes(dim, input.ndim, "log_softmax"), keepdims=True))


@log_softmax.vjp("input")
def _(xp: Any, g: Array, out: Array, dim: int) -> Array:
    return g - xp.exp(out) * xp.sum(g, axis=axes(dim, g.ndim, "log_softmax"), keepdims=True)


for _op in (softmax, softmin, log_softmax):

    @_op.samples
    def _() -> Iterator[Sample]:
        yield sample((2, 3, 5), -1)
        yield sample((4, 3), 0)
        yield sample((3, 1), 1)
        yield sample((0, 2), -1)

    @_op.errors
    def _() -> Iterator[ErrorSample]:
        yield ErrorSample(sample((2, 3), 2), ShapeError, "softmax: dim 2 is outside a tensor of 2 dims")


@primitive(torch="logsumexp")
def logsumexp(xp: Any, input: Array, dim: Dims, keepdim: bool = False) -> Array:
    """log(sum(exp(input))) over dim, computed from input - max(input)"""
    dims = axes(dim, input.ndim, "logsumexp")
    top = xp.max(input, axis=dims, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0.0)
    total = xp.log(xp.sum(xp.exp(input - top), axis=dims, keepdims=True)) + top
    return total if keepdim else xp.squeeze(total, dims)


@logsumexp.vjp("input")
def _(xp: Any, g: Array, input: Array, out: Array, dim: Dims, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "logsumexp")
    g, out = (spread(xp, a, input.shape, dims, keepdim) for a in (g, out))
    return g * xp.exp(input - xp.where(xp.isfinite(out), out, 0.0))


logsumexp.errors(no_such_dim())


@logsumexp.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 5), -1)
    yield sample((4, 3), (0, 1), keepdim=True)
    yield sample((3, 1), 1)
