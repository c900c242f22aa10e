"""Elements by whole-number index along a dim, and putting them where an index says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import Values, integers
from ..common.conditions import no_copies
from ..common.dims import Shape, axis
from .embedding import added_at, check_within
from .index_elements import element_sums, elements, no_elements_by_index


def _places(xp: Namespace, index: Array, dim: int, shape: Shape) -> tuple[Array, ...]:
    """An index of all dims of an array of `shape`: `index` along dim, each entry's own position along the others."""
    dim = axis(dim, index.ndim, "index")
    grids = []
    for d, n in enumerate(index.shape):
        along = [1] * index.ndim
        along[d] = -1
        grids.append(index % shape[d] if d == dim else (xp.arange(n) % shape[d]).reshape(along))
    return tuple(grids)


def _check_index(op: str, input: Array, index: Array, src: Array | None = None) -> None:
    """Raises ShapeError unless index holds integers and has as many dims as input and src."""
    if index.dtype.kind not in "iu":
        raise ShapeError(f"{op}: expected whole-number indices, got {index.dtype.name}")
    if index.ndim != input.ndim or (src is not None and src.ndim != input.ndim):
        shapes = [tuple(a.shape) for a in (input, index, src) if a is not None]
        raise ShapeError(f"{op}: input, index and source must have as many dims, got {shapes}")


def _check_places(xp: Namespace, op: str, input: Array, dim: int, index: Array, src: Array | None = None) -> None:
    """Raises ShapeError unless index fits input and src, IndexError for a position outside of input.

    Args:
        xp: the array namespace.
        op: the name in messages.
        input: (..., n, ...).
        dim: the dim along which it works.
        index: whole numbers, with as many dims.
        src: what is put there, or None.

    Raises:
        ShapeError: shapes do not fit.
        IndexError: a place outside of input.
    """
    _check_index(op, input, index, src)
    along, sizes = axis(dim, index.ndim, op), zip(index.shape, input.shape, strict=True)
    wide = any(n > m and d != along for d, (n, m) in enumerate(sizes))
    if index.size and (wide or (src is not None and any(n > m for n, m in zip(index.shape, src.shape, strict=True)))):
        shapes = [tuple(a.shape) for a in (index, input, src) if a is not None]
        raise ShapeError(
            f"{op}: index must be no larger than input beside dim {dim}, nor than its source, got {shapes}"
        )
    check_within(xp, op, index, input.shape[along] if input.ndim else 1)


@primitive(torch="take_along_dim", data_movement=True)
def take_along_dim(xp: Namespace, input: Array, indices: Array, dim: int | None = None) -> Array:
    """input[..., indices[..., i, ...], ...] along dim, where -1 is the last; without dim both are flattened"""
    if dim is None:
        check_within(xp, "take_along_dim", indices, input.size)
        return input.reshape(-1)[indices.reshape(-1)]
    _check_index("take_along_dim", input, indices)
    along = axis(dim, input.ndim, "take_along_dim")
    others = [(*s[:along], 1, *s[along + 1 :]) for s in (indices.shape, input.shape)]
    np.broadcast_shapes(*others)  # a ValueError, where NumPy's indexing would raise an IndexError
    size = input.shape[along] if input.ndim else 1
    check_within(xp, "take_along_dim", indices, size, -size)
    return xp.take_along_axis(input, indices, axis=along)


take_along_dim.non_differentiable("indices")


@take_along_dim.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, indices: Array, dim: int | None) -> Array:
    if dim is None:
        return added_at(xp, (int(np.prod(input_shape)),), indices.reshape(-1), g).reshape(input_shape)
    return added_at(xp, input_shape, _places(xp, xp.broadcast_to(indices, g.shape), dim, input_shape), g)


def _no_elements_along(input: Array, indices: Array, dim: int | None) -> str:
    return "flattened" if dim is None else no_elements_by_index(input, dim, indices)


@take_along_dim.cuda("flame", when=_no_elements_along)
def _(k: Launcher, input: Array, indices: Array, dim: int) -> Array:
    return elements(k, input, dim, indices)


@take_along_dim.cuda_vjp("flame", "input", when=_no_elements_along)
def _(k: Launcher, g: Array, input_shape: Shape, indices: Array, dim: int) -> Array:
    return element_sums(k, g, dim, indices, input_shape)


take_along_dim.errors(
    ErrorSample(sample((3, 5), integers(5, 3), 1), ShapeError, "take_along_dim: .* must have as many dims"),
    ErrorSample(sample((3, 5), (3, 2), 1), ShapeError, "expected whole-number indices, got float64"),
    ErrorSample(sample((3, 5), np.array([0, -1])), IndexError, r"in \[0, 15\), got -1 to 0"),
    ErrorSample(sample((3, 5), integers(5, 2, 5), 1), ShapeError, "do not broadcast together"),
    ErrorSample(sample((3, 5), np.full((3, 1), -6), 1), IndexError, r"in \[-5, 5\), got -6 to -6"),
)
take_along_dim.samples(
    sample((3, 5), integers(5, 3, 2), 1),
    sample((3, 5, 2), integers(3, 4, 5, 2), 0),
    sample((3, 5), integers(15, 4)),
    sample((3, 5), Values((3, 2), -5, 5, kind="int"), 1),
    sample((1, 5), integers(5, 3, 2), 1),
)


@primitive(torch="gather", data_movement=True)
def gather(xp: Namespace, input: Array, dim: int, index: Array) -> Array:
    """input[..., index[..., i, ...], ...] along dim; index may be smaller than input along the other dims"""
    _check_places(xp, "gather", input, dim, index)
    return input[_places(xp, index, dim, input.shape)]


gather.non_differentiable("index")


@gather.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, dim: int, index: Array) -> Array:
    return added_at(xp, input_shape, _places(xp, index, dim, input_shape), g)


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
        xp: the array namespace.
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
    """Puts src into an array at index.

    Args:
        xp: the array namespace.
        out: what is written to.
        dim, index, src: as in `scatter`.

    Returns:
        `out`.
    """
    out[_places(xp, index, dim, out.shape)] = src if isinstance(src, (int, float)) else src[_corner(index.shape)]
    return out


scatter.non_differentiable("index")


def _corner(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)


def _taken(xp: Namespace, g: Array, src_shape: Shape, index: Array, dim: int) -> Array:
    """The gradient of src: that of the positions it was put at or added to, zeros for entries that were not used.

    Args:
        xp: the array namespace.
        g: the gradient of the result.
        src_shape: src's shape.
        index: where it was put.
        dim: the dim along which it works.

    Returns:
        An array of `src_shape`.
    """
    out = xp.zeros(src_shape, g.dtype)
    out[_corner(index.shape)] = g[_places(xp, index, dim, g.shape)]
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
        xp: the array namespace.
        input: (..., n, ...).
        dim: the dim along which it works.
        index: whole numbers, with as many dims.
        src: the addends, no smaller than index.

    Returns:
        An array of input's shape.
    """
    _check_places(xp, "scatter_add", input, dim, index, src)
    work = compute_dtype(input.dtype)
    places = _places(xp, index, dim, input.shape)
    out = input.astype(work)
    xp.add.at(out, places, src[_corner(index.shape)].astype(work))
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
