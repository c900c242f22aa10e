"""Elements by whole-number index along a dim, and putting them where an index says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, compute_dtype, float32, int32, int64
from ..namespace import Namespace
from ..op import ErrorSample, primitive, sample
from ..op_samples import integers
from ..ops.common.conditions import no_copies
from ..ops.common.dims import Shape, axis
from ..ops.indexing.embedding import added_at, check_index, check_within, places
from ..ops.indexing.index_rows import element_sums, elements, no_elements_by_index, no_rows_by_index, summed, taken


def _check_places(xp: Namespace, op: str, input: Array, dim: int, index: Array, src: Array | None = None) -> None:
    """Raises ShapeError unless index fits input and src, IndexError for a position outside of input."""
    check_index(op, input, index, src)
    along, sizes = axis(dim, index.ndim, op), zip(index.shape, input.shape, strict=True)
    wide = any(n > m and d != along for d, (n, m) in enumerate(sizes))
    if index.size and (wide or (src is not None and any(n > m for n, m in zip(index.shape, src.shape, strict=True)))):
        shapes = [tuple(a.shape) for a in (index, input, src) if a is not None]
        raise ShapeError(
            f"{op}: index must be no larger than input beside dim {dim}, nor than its source, got {shapes}"
        )
    check_within(xp, op, index, input.shape[along] if input.ndim else 1)


@primitive(torch="gather", data_movement=True)
def gather(xp: Namespace, input: Array, dim: int, index: Array) -> Array:
    """input[..., index[..., i, ...], ...] along dim; index may be smaller than input along the other dims"""
    _check_places(xp, "gather", input, dim, index)
    return input[places(xp, index, dim, input.shape)]


gather.non_differentiable("index")


@gather.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    return added_at(xp, input_shape, places(xp, index, dim, input_shape), g)


@gather.cuda("flame", when=no_elements_by_index)
def _(k: Launcher, input: Array, dim: int, index: Array) -> Array:
    return elements(k, input, dim, index)


@gather.cuda_vjp("flame", "input", when=no_elements_by_index)
def _(k: Launcher, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    return element_sums(k, g, dim, index, input_shape)


gather.perf_samples(
    sample((37, 300), 1, integers(300, 37, 11)),
    sample((6, 30, 40), 1, integers(30, 6, 50, 40)),
    sample((5, 900), 1, integers(900, 5, 700)),
    sample((300, 77), 1, integers(77, 300, 1)),
    sample((60, 3, 19), 0, integers(60, 37, 3, 19)),
    sample((7, 130), 1, integers(1, 7, 130)),
)

gather.samples(
    sample((3, 5), 1, integers(5, 3, 2)),
    sample((3, 5, 2), 0, integers(3, 4, 3, 2)),
    sample((3, 5), -1, integers(5, 2, 7)),
)


@primitive(torch="scatter", data_movement=True)
def scatter(xp: Namespace, input: Array, dim: int, index: Array, src: Array | float) -> Array:
    """input with src put at index along dim: the place gather would read; of several at one place, any

    Args:
        input: (..., n, ...).
        dim: the dim along which it works.
        index: whole numbers, with as many dims.
        src: the values, no smaller than index, or one number.

    Returns:
        An array of input's shape.
    """
    _check_places(xp, "scatter", input, dim, index, None if isinstance(src, (int, float)) else src)
    return _put(xp, input.copy(), dim, index, src)


def _put(xp: Namespace, out: Array, dim: int, index: Array, src: Array | float) -> Array:
    """Puts src into an array at index."""
    out[places(xp, index, dim, out.shape)] = src if isinstance(src, (int, float)) else src[_corner(index.shape)]
    return out


scatter.non_differentiable("index")


def _corner(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)


def _taken(xp: Namespace, g: Array, src_shape: Shape, index: Array, dim: int) -> Array:
    """The gradient of src: that of the positions it was put at or added to, zeros for entries that were not used."""
    out = xp.zeros(src_shape, g.dtype)
    out[_corner(index.shape)] = g[places(xp, index, dim, g.shape)]
    return out


@scatter.vjp("input")
def _(xp: Namespace, g: Array, dim: int, index: Array) -> Array:
    return _put(xp, g.copy(), dim, index, 0.0)


@scatter.cuda("copies", when=no_copies)
def _(k: Launcher, input: Array, dim: int, index: Array, src: Array | float) -> Array:
    _check_places(k.xp, "scatter", input, dim, index, None if isinstance(src, (int, float)) else src)
    return _put(k.xp, k.copied(input), dim, index, src)


@scatter.cuda_vjp("copies", "input", when=no_copies)
def _(k: Launcher, g: Array, dim: int, index: Array) -> Array:
    return _put(k.xp, k.copied(g), dim, index, 0.0)


scatter.vjp("src")(lambda xp, g, src_shape, dim, index: _taken(xp, g, src_shape, index, dim))

_ONCE = np.array([[3, 0], [1, 2], [0, 4]])  # no position twice in a row: with repeats scatter's result is not unique

scatter.samples(sample((3, 5), 1, _ONCE, (3, 2)), sample((4, 5), -1, _ONCE, (4, 3)), sample((3, 5), 1, _ONCE, 0.7))


@primitive(torch="scatter_add", data_movement=True)
def scatter_add(xp: Namespace, input: Array, dim: int, index: Array, src: Array) -> Array:
    """input with src added at index along dim, repeated places added up

    Args:
        input: (..., n, ...).
        dim: the dim along which it works.
        index: whole numbers, with as many dims.
        src: the addends, no smaller than index.

    Returns:
        An array of input's shape.
    """
    _check_places(xp, "scatter_add", input, dim, index, src)
    work = compute_dtype(input.dtype)
    at = places(xp, index, dim, input.shape)
    out = input.astype(work)
    xp.add.at(out, at, src[_corner(index.shape)].astype(work))
    return out.astype(input.dtype)


scatter_add.non_differentiable("index")

scatter_add.vjp("input")(lambda xp, g: g)

scatter_add.vjp("src")(lambda xp, g, src_shape, dim, index: _taken(xp, g, src_shape, index, dim))


def _no_sources(input: Array, dim: int, index: Array, src: Array) -> str:
    if src.shape != index.shape or src.dtype != input.dtype:
        return "index has another shape than src, or they have another dtype"
    return no_elements_by_index(input, dim, index)


@scatter_add.cuda("flame", when=_no_sources)
def _(k: Launcher, input: Array, dim: int, index: Array, src: Array) -> Array:
    return element_sums(k, src, dim, index, input.shape, input)


@scatter_add.cuda_vjp("flame", "src", when=_no_sources)
def _(k: Launcher, g: Array, dim: int, index: Array) -> Array:
    return elements(k, g, dim, index)


scatter_add.perf_samples(
    sample((37, 300), 1, integers(300, 37, 11), (37, 11)),
    sample((6, 30, 40), 1, integers(30, 6, 50, 40), (6, 50, 40)),
    sample((5, 900), 1, integers(900, 5, 700), (5, 700)),
    sample((60, 3, 19), 0, integers(60, 37, 3, 19), (37, 3, 19)),
    sample((7, 130), 1, integers(1, 7, 130), (7, 130)),
)

scatter_add.samples(sample((3, 5), 1, integers(5, 3, 4), (3, 4)), sample((3, 5), 0, integers(3, 2, 4), (4, 5)))

for _op in (gather, scatter, scatter_add):

    def _op_errors(op: Any = _op) -> Iterator[ErrorSample]:
        rest = () if op is gather else ((2, 3),)
        yield ErrorSample(sample((2, 3), 0, (2, 3), *rest), ShapeError, "expected whole-number indices, got float64")
        yield ErrorSample(sample((2, 3), 0, integers(2, 3), *rest), ShapeError, "must have as many dims")
        yield ErrorSample(sample((2, 3), 1, integers(2, 3, 3), *rest), ShapeError, "no larger than input beside dim 1")
        yield ErrorSample(sample((2, 3), 1, np.array([[0, -1]]), *rest), IndexError, r"in \[0, 3\), got -1 to 0")
        yield ErrorSample(sample((2, 3), -2, np.array([[0, 2]]), *rest), IndexError, r"in \[0, 2\), got 0 to 2")
        if op is not gather:
            yield ErrorSample(sample((2, 3), 0, integers(2, 2, 3), (2, 2)), ShapeError, "nor than its source, got")

    _op.errors(*_op_errors())


@primitive(torch="index_select", data_movement=True)
def index_select(xp: Namespace, input: Array, dim: int, index: Array) -> Array:
    """The slices of input along dim that index (1-D) names"""
    if index.ndim > 1 or index.dtype.kind not in "iu":
        raise ShapeError(f"index_select: expected 1-D whole-number indices, got {index.dtype.name} {index.shape}")
    along = axis(dim, input.ndim, "index_select")
    if input.ndim == 0 and index.size != 1:
        raise ShapeError(f"index_select: expected one index into a tensor of one number, got {index.size}")
    rows = input if input.ndim else input.reshape(1)
    check_within(xp, "index_select", index, rows.shape[along])
    return xp.take(rows, index.reshape(-1), axis=along).reshape(_selected(input.shape, dim, index.size))


def _selected(shape: Shape, dim: int, count: int) -> Shape:
    return tuple(count if d == dim % len(shape) else n for d, n in enumerate(shape)) if shape else ()


index_select.non_differentiable("index")


@index_select.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    if not input_shape:
        return g
    moved = xp.moveaxis(g, dim, 0)
    return xp.moveaxis(added_at(xp, (input_shape[dim], *moved.shape[1:]), index.reshape(-1), moved), 0, dim)


def _no_slices(input: Array, dim: int, index: Array) -> str:
    if input.ndim == 0 or index.ndim > 1 or not -input.ndim <= dim < input.ndim:
        return "no slices, or arguments that are refused"
    return no_rows_by_index(input, index)


@index_select.cuda("flame", when=_no_slices)
def _(k: Launcher, input: Array, dim: int, index: Array) -> Array:
    dim = dim % input.ndim
    outer, inner = math.prod(input.shape[:dim]), math.prod(input.shape[dim + 1 :])
    found = taken(k, k.contiguous(input).reshape(outer, input.shape[dim], inner), index.reshape(-1))
    return found.reshape(_selected(input.shape, dim, index.size))


@index_select.cuda_vjp("flame", "input", when=_no_slices)
def _(k: Launcher, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    moved = k.xp.moveaxis(g, dim, 0)
    total = summed(k, k.contiguous(moved).reshape(len(moved), -1), index.reshape(-1), input_shape[dim])
    return k.xp.moveaxis(total.reshape(input_shape[dim], *moved.shape[1:]), 0, dim)


index_select.perf_samples(sample((7, 33, 40), 1, integers(33, 90)), sample((50, 24), 0, integers(50, 300)))

index_select.samples(
    sample((4, 3), 0, integers(4, 6)), sample((2, 3, 4), -2, integers(3, 2)), sample((), 0, np.array([0]))
)

index_select.errors(
    ErrorSample(sample((), 0, np.array([0, 0])), ShapeError, "one index into a tensor of one number, got 2"),
    ErrorSample(sample((4, 3), 0, integers(4, 2, 2)), ShapeError, "expected 1-D whole-number indices"),
    ErrorSample(sample((4, 3), 1, np.array([2, -1])), IndexError, r"in \[0, 3\), got -1 to 2"),
)


@primitive(torch="nn.functional.one_hot", data_movement=True)
def one_hot(xp: Namespace, input: Array, num_classes: int = -1) -> Array:
    """1 at each index along a new last dim of num_classes, else 0 (int64); -1 takes the largest index plus one"""
    if input.dtype.kind not in "iu":
        raise ShapeError(f"one_hot: expected whole-number classes, got {input.dtype.name}")
    if num_classes == -1 and not input.size:
        raise ShapeError("one_hot: expected num_classes where there is no class to count from, got -1")
    count = int(input.max()) + 1 if num_classes == -1 else num_classes
    check_within(xp, "one_hot", input, count)
    return (input[..., None] == xp.arange(count)).astype(np.int64)


one_hot.non_differentiable("input")


def _no_classes(input: Array, num_classes: int) -> str:
    if input.dtype not in (int32, int64) or input.size == 0:
        return "nothing to compute with"
    return "" if 0 < num_classes <= 1 << 24 else "classes to be counted first, or more than fp32 counts"


@one_hot.cuda("generated", when=_no_classes)
def _(k: Launcher, input: Array, num_classes: int) -> Array:
    operands = {"input": input[..., None], "at": k.xp.arange(num_classes, dtype=float32)}
    return k.elementwise(("input == at ? 1.f : 0.f",), operands, (int64,))[0]


one_hot.samples(sample(integers(5, 2, 3), 5), sample(integers(4, 6)))

one_hot.errors(
    ErrorSample(sample((3,), 4), ShapeError, "expected whole-number classes, got float64"),
    ErrorSample(sample(np.array([0, -1])), IndexError, r"in \[0, 1\), got -1 to 0"),
    ErrorSample(sample(np.array([0, 4]), 4), IndexError, r"in \[0, 4\), got 0 to 4"),
    ErrorSample(sample(integers(3, 0)), ShapeError, "expected num_classes"),
)
