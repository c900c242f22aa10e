"""Reductions, with `dim` and `keepdim` as in PyTorch; without `dim` over everything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..dtype import Array
from ..op import Sample, primitive, sample

Dims = int | Sequence[int] | None
Shape = tuple[int, ...]


def _axes(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The reduced axes, counted from the front."""
    if dim is None:
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim for d in dims)


def _spread(xp: Any, g: Array, shape: tuple[int, ...], dim: Dims, keepdim: bool) -> Array:
    """A reduced gradient laid out again over the shape it was reduced from (a view, no copy)."""
    if not keepdim:
        for axis in sorted(_axes(dim, len(shape))):
            g = xp.expand_dims(g, axis)
    return xp.broadcast_to(g, shape)


@primitive(torch="sum")
def sum(xp: Any, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The sum over dim"""
    return xp.sum(input, axis=_axes(dim, input.ndim), keepdims=keepdim)


@sum.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, dim: Dims, keepdim: bool) -> Array:
    return _spread(xp, g, input_shape, dim, keepdim)


@primitive(torch="mean")
def mean(xp: Any, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The mean over dim"""
    return xp.mean(input, axis=_axes(dim, input.ndim), keepdims=keepdim)


@mean.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, dim: Dims, keepdim: bool) -> Array:
    count = max(math.prod(input_shape[a] for a in _axes(dim, len(input_shape))), 1)
    return _spread(xp, g / count, input_shape, dim, keepdim)


@primitive(torch="amax")
def amax(xp: Any, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The largest value over dim; ties share the gradient evenly"""
    return xp.max(input, axis=_axes(dim, input.ndim), keepdims=keepdim)


@amax.vjp("input")
def _(xp: Any, g: Array, input: Array, out: Array, dim: Dims, keepdim: bool) -> Array:
    here = input == _spread(xp, out, input.shape, dim, keepdim)
    count = xp.sum(here, axis=_axes(dim, input.ndim), keepdims=keepdim)
    return xp.where(here, _spread(xp, g / count, input.shape, dim, keepdim), 0.0)


@primitive(torch="var")
def var(xp: Any, input: Array, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Array:
    """sum((input - mean)^2) / (count - correction) over dim"""
    return xp.var(input, axis=_axes(dim, input.ndim), ddof=correction, keepdims=keepdim)


@var.vjp("input")
def _(xp: Any, g: Array, input: Array, dim: Dims, correction: int, keepdim: bool) -> Array:
    count = math.prod(input.shape[a] for a in _axes(dim, input.ndim))
    centred = input - xp.mean(input, axis=_axes(dim, input.ndim), keepdims=True)
    return _spread(xp, g, input.shape, dim, keepdim) * centred * (2.0 / (count - correction))


for _op in (sum, mean, amax, var):

    @_op.samples
    def _() -> Iterator[Sample]:
        yield sample((2, 3, 4))
        yield sample((2, 3, 4), 1)
        yield sample((2, 3, 4), (0, 2), keepdim=True)
        yield sample((2, 3, 4), -1, keepdim=True)
