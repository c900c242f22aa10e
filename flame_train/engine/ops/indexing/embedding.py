"""Rows and elements by whole-number index, and elements replaced by a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, bool_, compute_dtype, is_float
from ...namespace import Namespace, is_numpy
from ...op import ErrorSample, primitive, sample
from ...op_samples import Values, booleans, integers
from ..common.dims import Shape, axis
from ..common.elementwise_codegen import elementwise_kernel
from .index_rows import element_sums, elements, no_elements_by_index, no_rows_by_index, summed, taken


def added_at(xp: Namespace, shape: Shape, index: Any, values: Array) -> Array:
    """Zeros of `shape` with values added at index; values at the same position add up, in fp32 or fp64.

    On a GPU the order of the additions, and so the last bit, may change from run to run.
    """
    out = xp.zeros(shape, compute_dtype(values.dtype))
    xp.add.at(out, index, values.astype(out.dtype))
    return out.astype(values.dtype)


def check_within(xp: Namespace, op: str, index: Array, size: int, least: int = 0) -> None:
    """Raises IndexError for an index outside [least, size), on the CPU only.

    On a GPU the check would have to wait for the device; there an index out of range wraps around.
    """
    if index.size and size == 0:  # there is nothing to wrap around to
        raise IndexError(f"{op}: expected no index where there are no places, got {index.size}")
    if is_numpy(xp) and index.size and not (index.min() >= least and index.max() < size):
        raise IndexError(f"{op}: expected whole numbers in [{least}, {size}), got {index.min()} to {index.max()}")


@primitive(torch="nn.functional.embedding", data_movement=True)
def embedding(xp: Namespace, input: Array, weight: Array, padding_idx: int | None = None) -> Array:
    """weight[input]: rows of weight by index; the row padding_idx gets no gradient"""
    if input.dtype.kind not in "iu":
        raise ShapeError(f"embedding: expected whole-number indices, got {input.dtype.name}")
    rows = len(weight)
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise IndexError(f"embedding: expected padding_idx in [{-rows}, {rows}), got {padding_idx}")
    check_within(xp, "embedding", input, rows)
    return weight[input]


embedding.non_differentiable("input")


@embedding.vjp("weight")
def _(xp: Namespace, g: Array, input: Array, weight_shape: Shape, padding_idx: int | None) -> Array:
    dw = added_at(xp, weight_shape, input, g)
    if padding_idx is not None:
        dw[padding_idx] = 0
    return dw


def _no_table(input: Array, weight: Array) -> str:
    return "no table of rows" if weight.ndim != 2 else no_rows_by_index(weight, input)


@embedding.cuda("flame", when=_no_table)
def _(k: Launcher, input: Array, weight: Array) -> Array:
    return taken(k, weight.reshape(1, *weight.shape), input.reshape(-1)).reshape(*input.shape, weight.shape[1])


@embedding.cuda_vjp("flame", "weight", when=_no_table)
def _(k: Launcher, g: Array, input: Array, weight_shape: Shape, padding_idx: int | None) -> Array:
    rows, length = weight_shape
    dw = summed(k, g.reshape(-1, length), input.reshape(-1), rows)
    if padding_idx is not None:
        dw[padding_idx] = 0
    return dw


embedding.perf_samples(
    sample(integers(70, 5, 77), (70, 64), 3),
    sample(integers(3, 2500), (9, 12)),
    sample(integers(2000, 300), (2000, 5)),
    sample(integers(1, 1000), (7, 72)),
    sample(integers(3000, 2, 1100), (3000, 40)),
)

embedding.samples(sample(integers(5, 2, 3), (5, 4)), sample(integers(5, 7), (5, 1)))

embedding.errors(
    ErrorSample(sample((2, 3), (5, 4)), ShapeError, "expected whole-number indices, got float64"),
    ErrorSample(sample(np.array([0, -1]), (5, 4)), IndexError, r"in \[0, 5\), got -1 to 0"),
    ErrorSample(sample(integers(5, 2), (5, 4), 5), IndexError, r"padding_idx in \[-5, 5\), got 5"),
)


@primitive(torch="masked_fill", accepts_integers=True)
def masked_fill(xp: Namespace, input: Array, mask: Array, value: Array | float) -> Array:
    """value where mask holds, else input"""
    if mask.dtype != bool:
        raise ShapeError(f"masked_fill: expected a boolean mask, got {mask.dtype.name}")
    if is_float(input.dtype):
        return xp.where(mask, value, input)
    if is_float(value.dtype) if hasattr(value, "dtype") else value % 1:
        raise ShapeError(f"masked_fill: {input.dtype.name} cannot hold {value}; make a float tensor of input first")
    return xp.where(mask, value, input).astype(input.dtype)


masked_fill.non_differentiable("mask")

masked_fill.vjp("input")(lambda xp, g, mask: xp.where(mask, 0.0, g))

masked_fill.vjp("value")(lambda xp, g, mask: xp.where(mask, g, 0.0))


elementwise_kernel(
    masked_fill,
    "mask != 0.f ? value : input",
    when=lambda mask: "" if mask.dtype == bool_ else "a mask that is refused",
    input="mask != 0.f ? 0.f : g",
    value="mask != 0.f ? g : 0.f",
)

masked_fill.samples(sample((3, 4), booleans(3, 4), -1.5), sample((2, 3, 4), booleans(4), ()))

masked_fill.errors(
    ErrorSample(sample((3,), (3,), 0.0), ShapeError, "expected a boolean mask, got float64"),
    ErrorSample(sample(integers(3, 2), booleans(2), 0.5), ShapeError, "int64 cannot hold 0.5"),
)


def places(xp: Namespace, index: Array, dim: int, shape: Shape) -> tuple[Array, ...]:
    """An index of all dims of an array of `shape`: `index` along dim, each entry's own position along the others."""
    dim = axis(dim, index.ndim, "index")
    grids = []
    for d, n in enumerate(index.shape):
        along = [1] * index.ndim
        along[d] = -1
        grids.append(index % shape[d] if d == dim else (xp.arange(n) % shape[d]).reshape(along))
    return tuple(grids)


def check_index(op: str, input: Array, index: Array, src: Array | None = None) -> None:
    """Raises ShapeError unless index holds integers and has as many dims as input and src."""
    if index.dtype.kind not in "iu":
        raise ShapeError(f"{op}: expected whole-number indices, got {index.dtype.name}")
    if index.ndim != input.ndim or (src is not None and src.ndim != input.ndim):
        shapes = [tuple(a.shape) for a in (input, index, src) if a is not None]
        raise ShapeError(f"{op}: input, index and source must have as many dims, got {shapes}")


@primitive(torch="take_along_dim", data_movement=True)
def take_along_dim(xp: Namespace, input: Array, indices: Array, dim: int | None = None) -> Array:
    """input[..., indices[..., i, ...], ...] along dim, where -1 is the last; without dim both are flattened"""
    if dim is None:
        check_within(xp, "take_along_dim", indices, input.size)
        return input.reshape(-1)[indices.reshape(-1)]
    check_index("take_along_dim", input, indices)
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
    return added_at(xp, input_shape, places(xp, xp.broadcast_to(indices, g.shape), dim, input_shape), g)


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
