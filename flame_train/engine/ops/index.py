"""Looking things up by whole-number index, and putting them where an index says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array, bool_, compute_dtype, float32, int32, int64
from ..op import ErrorSample, Sample, primitive, sample
from ..sample import booleans, integers
from .dims import Shape, axis
from .generated import generated
from .index_rows import no_rows_by_index, summed, taken


def added_at(xp: Any, shape: Shape, index: Any, values: Array) -> Array:
    """Zeros of `shape` with values added at index, repeated places added up; the sums are kept in fp32 or fp64.

    On a GPU the order of the additions, and so the last bit, may change from run to run.
    """
    out = xp.zeros(shape, compute_dtype(values.dtype))
    xp.add.at(out, index, values.astype(out.dtype))
    return out.astype(values.dtype)


def _places(xp: Any, index: Array, dim: int, shape: Shape) -> tuple[Array, ...]:
    """Where index points along dim in an array of `shape`, each entry in its own row: an index for all dims."""
    dim = axis(dim, index.ndim, "index")
    grids = []
    for d, n in enumerate(index.shape):
        along = [1] * index.ndim
        along[d] = -1
        grids.append(index % shape[d] if d == dim else (xp.arange(n) % shape[d]).reshape(along))
    return tuple(grids)


def _check_index(op: str, input: Array, index: Array, src: Array | None = None) -> None:
    """Raises ShapeError unless index has the dims of its partners and whole numbers."""
    if index.dtype.kind not in "iu":
        raise ShapeError(f"{op}: expected whole-number indices, got {index.dtype.name}")
    if index.ndim != input.ndim or (src is not None and src.ndim != input.ndim):
        shapes = [tuple(a.shape) for a in (input, index, src) if a is not None]
        raise ShapeError(f"{op}: input, index and source must have as many dims, got {shapes}")


@primitive(torch="nn.functional.embedding", moves=True)
def embedding(xp: Any, input: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """weight[input]: rows of weight by index; the row padding_idx gets no gradient"""
    if input.dtype.kind not in "iu":
        raise ShapeError(f"embedding: expected whole-number indices, got {input.dtype.name}")
    return weight[input]


embedding.nograd("input")


@embedding.vjp("weight")
def _(xp: Any, g: Array, input: Array, weight_shape: Shape, padding_idx: int | None) -> Array:
    dw = added_at(xp, weight_shape, input, g)
    if padding_idx is not None:
        dw[padding_idx] = 0
    return dw


def _no_table(input: Array, weight: Array) -> str:
    return "no table of rows" if weight.ndim != 2 else no_rows_by_index(weight, input)


@embedding.cuda("flame", when=_no_table)
def _(k: Any, input: Array, weight: Array, padding_idx: int | None) -> Array:
    return taken(k, weight.reshape(1, *weight.shape), input.reshape(-1)).reshape(*input.shape, weight.shape[1])


@embedding.cuda_vjp("flame", "weight", when=_no_table)
def _(k: Any, g: Array, input: Array, weight_shape: Shape, padding_idx: int | None) -> Array:
    rows, length = weight_shape
    dw = summed(k, g.reshape(-1, length), input.reshape(-1), rows)
    if padding_idx is not None:
        dw[padding_idx] = 0
    return dw


@embedding.large_samples
def _() -> Iterator[Sample]:
    yield sample(integers(70, 5, 77), (70, 64), 3)
    yield sample(integers(3, 2500), (9, 12))
    yield sample(integers(2000, 300), (2000, 5))


@embedding.samples
def _() -> Iterator[Sample]:
    yield sample(integers(5, 2, 3), (5, 4))
    yield sample(integers(5, 7), (5, 1))


@embedding.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (5, 4)), ShapeError, "expected whole-number indices, got float64")


@primitive(torch="take_along_dim", moves=True)
def take_along_dim(xp: Any, input: Array, indices: Array, dim: int | None = None) -> Array:
    """input[..., indices[..., i, ...], ...] along dim; without dim both are flattened"""
    if dim is None:
        return input.reshape(-1)[indices.reshape(-1)]
    _check_index("take_along_dim", input, indices)
    return xp.take_along_axis(input, indices, axis=dim)


take_along_dim.nograd("indices")


@take_along_dim.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, indices: Array, dim: int | None) -> Array:
    if dim is None:
        return added_at(xp, (int(np.prod(input_shape)),), indices.reshape(-1), g).reshape(input_shape)
    return added_at(xp, input_shape, _places(xp, xp.broadcast_to(indices, g.shape), dim, input_shape), g)


@take_along_dim.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((3, 5), integers(5, 3), 1), ShapeError, "take_along_dim: .* must have as many dims")
    yield ErrorSample(sample((3, 5), (3, 2), 1), ShapeError, "expected whole-number indices, got float64")


@take_along_dim.samples
def _() -> Iterator[Sample]:
    yield sample((3, 5), integers(5, 3, 2), 1)
    yield sample((3, 5, 2), integers(3, 4, 5, 2), 0)
    yield sample((3, 5), integers(15, 4))
    yield sample((1, 5), integers(5, 3, 2), 1)


@primitive(torch="gather", moves=True)
def gather(xp: Any, input: Array, dim: int, index: Array) -> Array:
    """input[..., index[..., i, ...], ...] along dim; index may be smaller than input along the other dims"""
    _check_index("gather", input, index)
    return input[_places(xp, index, dim, input.shape)]


gather.nograd("index")


@gather.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    return added_at(xp, input_shape, _places(xp, index, dim, input_shape), g)


@gather.samples
def _() -> Iterator[Sample]:
    yield sample((3, 5), 1, integers(5, 3, 2))
    yield sample((3, 5, 2), 0, integers(3, 4, 3, 2))
    yield sample((3, 5), -1, integers(5, 2, 7))


@primitive(torch="scatter", moves=True)
def scatter(xp: Any, input: Array, dim: int, index: Array, src: Array | float) -> Array:
    """input with src put at index along dim: the place gather would read; of several at one place, any"""
    _check_index("scatter", input, index, None if isinstance(src, (int, float)) else src)
    out = input.copy()
    out[_places(xp, index, dim, input.shape)] = src if isinstance(src, (int, float)) else src[_corner(index.shape)]
    return out


scatter.nograd("index")


def _corner(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)


def _taken(xp: Any, g: Array, src_shape: Shape, index: Array, dim: int) -> Array:
    """The gradient of what was put or added: what the places got, zeros where src was not read."""
    out = xp.zeros(src_shape, g.dtype)
    out[_corner(index.shape)] = g[_places(xp, index, dim, g.shape)]
    return out


@scatter.vjp("input")
def _(xp: Any, g: Array, dim: int, index: Array) -> Array:
    g = g.copy()
    g[_places(xp, index, dim, g.shape)] = 0
    return g


@scatter.vjp("src")
def _(xp: Any, g: Array, src_shape: Shape, dim: int, index: Array) -> Array:
    return _taken(xp, g, src_shape, index, dim)


_ONCE = np.array([[3, 0], [1, 2], [0, 4]])  # no place twice in a row: with doubles scatter has no one result


@scatter.samples
def _() -> Iterator[Sample]:
    yield sample((3, 5), 1, _ONCE, (3, 2))
    yield sample((4, 5), -1, _ONCE, (4, 3))
    yield sample((3, 5), 1, _ONCE, 0.7)


@primitive(torch="scatter_add", moves=True)
def scatter_add(xp: Any, input: Array, dim: int, index: Array, src: Array) -> Array:
    """input with src added at index along dim, repeated places added up"""
    _check_index("scatter_add", input, index, src)
    work = compute_dtype(input.dtype)
    places = _places(xp, index, dim, input.shape)
    out = input.astype(work)
    xp.add.at(out, places, src[_corner(index.shape)].astype(work))
    return out.astype(input.dtype)


scatter_add.nograd("index")


@scatter_add.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


@scatter_add.vjp("src")
def _(xp: Any, g: Array, src_shape: Shape, dim: int, index: Array) -> Array:
    return _taken(xp, g, src_shape, index, dim)


@scatter_add.samples
def _() -> Iterator[Sample]:
    yield sample((3, 5), 1, integers(5, 3, 4), (3, 4))
    yield sample((3, 5), 0, integers(3, 2, 4), (4, 5))


for _op in (gather, scatter, scatter_add):

    @_op.errors
    def _(op: Any = _op) -> Iterator[ErrorSample]:
        rest = () if op is gather else ((2, 3),)
        yield ErrorSample(sample((2, 3), 0, (2, 3), *rest), ShapeError, "expected whole-number indices, got float64")
        yield ErrorSample(sample((2, 3), 0, integers(2, 3), *rest), ShapeError, "must have as many dims")


@primitive(torch="index_select", moves=True)
def index_select(xp: Any, input: Array, dim: int, index: Array) -> Array:
    """The slices of input along dim that index (1-D) names"""
    if index.ndim > 1 or index.dtype.kind not in "iu":
        raise ShapeError(f"index_select: expected 1-D whole-number indices, got {index.dtype.name} {index.shape}")
    return xp.take(input, index.reshape(-1), axis=axis(dim, input.ndim, "index_select")).reshape(
        _selected(input.shape, dim, index.size)
    )


def _selected(shape: Shape, dim: int, count: int) -> Shape:
    return tuple(count if d == dim % len(shape) else n for d, n in enumerate(shape)) if shape else ()


index_select.nograd("index")


@index_select.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    if not input_shape:
        return g
    moved = xp.moveaxis(g, dim, 0)
    return xp.moveaxis(added_at(xp, (input_shape[dim], *moved.shape[1:]), index.reshape(-1), moved), 0, dim)


def _no_slices(input: Array, dim: int, index: Array) -> str:
    if input.ndim == 0 or index.ndim > 1 or not -input.ndim <= dim < input.ndim:
        return "no slices, or arguments that are refused"
    return no_rows_by_index(input, index)


@index_select.cuda("flame", when=_no_slices)
def _(k: Any, input: Array, dim: int, index: Array) -> Array:
    dim = dim % input.ndim
    outer, inner = math.prod(input.shape[:dim]), math.prod(input.shape[dim + 1 :])
    found = taken(k, k.rows_first(input).reshape(outer, input.shape[dim], inner), index.reshape(-1))
    return found.reshape(_selected(input.shape, dim, index.size))


@index_select.cuda_vjp("flame", "input", when=_no_slices)
def _(k: Any, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    moved = k.xp.moveaxis(g, dim, 0)
    total = summed(k, k.rows_first(moved).reshape(len(moved), -1), index.reshape(-1), input_shape[dim])
    return k.xp.moveaxis(total.reshape(input_shape[dim], *moved.shape[1:]), 0, dim)


@index_select.large_samples
def _() -> Iterator[Sample]:
    yield sample((7, 33, 40), 1, integers(33, 90))
    yield sample((50, 24), 0, integers(50, 300))


@index_select.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), 0, integers(4, 6))
    yield sample((2, 3, 4), -2, integers(3, 2))


@index_select.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 3), 0, integers(4, 2, 2)), ShapeError, "expected 1-D whole-number indices")


@primitive(torch="masked_fill")
def masked_fill(xp: Any, input: Array, mask: Array, value: Array | float) -> Array:
    """value where mask holds, else input"""
    if mask.dtype != bool:
        raise ShapeError(f"masked_fill: expected a boolean mask, got {mask.dtype.name}")
    return xp.where(mask, value, input)


masked_fill.nograd("mask")


@masked_fill.vjp("input")
def _(xp: Any, g: Array, mask: Array) -> Array:
    return xp.where(mask, 0.0, g)


@masked_fill.vjp("value")
def _(xp: Any, g: Array, mask: Array) -> Array:
    return xp.where(mask, g, 0.0)


def _no_mask(mask: Array) -> str:
    return "" if mask.dtype == bool_ else "a mask that is refused"


generated(
    masked_fill, "mask != 0.f ? value : input", when=_no_mask,
    input="mask != 0.f ? 0.f : g", value="mask != 0.f ? g : 0.f",
)  # fmt: skip


@masked_fill.samples
def _() -> Iterator[Sample]:
    yield sample((3, 4), booleans(3, 4), -1.5)
    yield sample((2, 3, 4), booleans(4), ())


@masked_fill.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((3,), (3,), 0.0), ShapeError, "expected a boolean mask, got float64")


@primitive(torch="nn.functional.one_hot", moves=True)
def one_hot(xp: Any, input: Array, num_classes: int = -1) -> Array:
    """1 at each index along a new last dim of num_classes, else 0 (int64); -1 takes the largest index plus one"""
    if input.dtype.kind not in "iu":
        raise ShapeError(f"one_hot: expected whole-number classes, got {input.dtype.name}")
    count = int(input.max()) + 1 if num_classes == -1 else num_classes
    return (input[..., None] == xp.arange(count)).astype(np.int64)


one_hot.nograd("input")


def _no_classes(input: Array, num_classes: int) -> str:
    if input.dtype not in (int32, int64) or input.size == 0:
        return "nothing to compute with"
    return "" if 0 < num_classes <= 1 << 24 else "classes to be counted first, or more than fp32 counts"


@one_hot.cuda("generated", when=_no_classes)
def _(k: Any, input: Array, num_classes: int) -> Array:
    operands = {"input": input[..., None], "at": k.xp.arange(num_classes, dtype=float32)}
    return k.elementwise(("input == at ? 1.f : 0.f",), operands, (int64,))[0]


@one_hot.samples
def _() -> Iterator[Sample]:
    yield sample(integers(5, 2, 3), 5)
    yield sample(integers(4, 6))


@one_hot.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((3,), 4), ShapeError, "expected whole-number classes, got float64")
