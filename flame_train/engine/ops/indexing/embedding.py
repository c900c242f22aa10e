"""Rows and slices by integer index, elements replaced by a mask, and classes as one-hot vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, bool_, compute_dtype, float32, int32, int64, is_float
from ...namespace import Namespace, is_numpy
from ...op import ErrorSample, primitive, sample
from ...op_samples import booleans, integers
from ..common.dims import Shape, axis
from ..common.elementwise_codegen import elementwise_kernel
from .index_rows import no_rows_by_index, summed, taken


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

    Args:
        xp: the array namespace.
        op: the name in messages.
        index: whole numbers.
        size: indices are below this,
        least: and at least this.

    Raises:
        IndexError: an index outside, where arrays are on the CPU; any index where there are no places.
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


def _no_mask(mask: Array) -> str:
    return "" if mask.dtype == bool_ else "a mask that is refused"


elementwise_kernel(
    masked_fill,
    "mask != 0.f ? value : input",
    when=_no_mask,
    input="mask != 0.f ? 0.f : g",
    value="mask != 0.f ? g : 0.f",
)


masked_fill.samples(sample((3, 4), booleans(3, 4), -1.5), sample((2, 3, 4), booleans(4), ()))
masked_fill.errors(
    ErrorSample(sample((3,), (3,), 0.0), ShapeError, "expected a boolean mask, got float64"),
    ErrorSample(sample(integers(3, 2), booleans(2), 0.5), ShapeError, "int64 cannot hold 0.5"),
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
