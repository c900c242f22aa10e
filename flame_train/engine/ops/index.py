"""Looking things up by whole-number index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ShapeError
from ..dtype import Array, compute_dtype
from ..op import Sample, primitive, sample
from ..sample import integers


def scatter_add(xp: Any, shape: tuple[int, ...], index: Any, values: Array) -> Array:
    """Zeros of `shape` with values added at index, repeated places added up; the sums are kept in fp32 or fp64.

    On a GPU the order of the additions, and so the last bit, may change from run to run.
    """
    out = xp.zeros(shape, compute_dtype(values.dtype))
    xp.add.at(out, index, values.astype(out.dtype))
    return out.astype(values.dtype)


@primitive(torch="nn.functional.embedding", moves=True)
def embedding(xp: Any, input: Array, weight: Array) -> Array:
    """weight[input]: rows of weight by index"""
    if input.dtype.kind not in "iu":
        raise ShapeError(f"embedding: expected whole-number indices, got {input.dtype.name}")
    return weight[input]


embedding.nograd("input")


@embedding.vjp("weight")
def _(xp: Any, g: Array, input: Array, weight_shape: tuple[int, ...]) -> Array:
    return scatter_add(xp, weight_shape, input, g)


@embedding.samples
def _() -> Iterator[Sample]:
    yield sample(integers(5, 2, 3), (5, 4))
    yield sample(integers(5, 7), (5, 1))


@primitive(torch="take_along_dim", moves=True)
def take_along_dim(xp: Any, input: Array, indices: Array, dim: int) -> Array:
    """input[..., indices[..., i, ...], ...] along dim"""
    return xp.take_along_axis(input, indices, axis=dim)


take_along_dim.nograd("indices")


@take_along_dim.vjp("input")
def _(xp: Any, g: Array, input_shape: tuple[int, ...], indices: Array, dim: int) -> Array:
    grids = list(xp.meshgrid(*[xp.arange(n) for n in indices.shape], indexing="ij"))
    grids[dim] = indices % input_shape[dim]
    return scatter_add(xp, input_shape, tuple(grids), g)


@take_along_dim.samples
def _() -> Iterator[Sample]:
    yield sample((3, 5), integers(5, 3, 2), 1)
    yield sample((3, 5, 2), integers(3, 4, 5, 2), 0)
