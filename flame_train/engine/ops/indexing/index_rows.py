"""Kernels that take rows or elements by index, and that add rows or elements at an index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...backend.cuda.codegen.rows import divisor
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, float32, int32, int64
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape

_HEADER, _TILE, _GROUP, _ACROSS, _LANES, _AHEAD = "ops/indexing/index_rows.cuh", 2048, 64, 64, 8, 2  # as in that header

_FEW = 1024  # as there: up to so many indices are compared with each other; more are sorted


def no_rows_by_index(x: Array, index: Array) -> str:
    """Says why the kernels cannot take rows of `x` at `index`; "" if they can."""
    if index.dtype not in (int32, int64):
        return f"no kernel for indices in {index.dtype.name}"
    if 0 in (x.size, index.size) or x.size >= 2**31 or x.size // max(x.shape) * index.size >= 2**31:
        return "nothing to take, or too much"
    return same(AT_MOST_FP32, x)


def _names(dtype: DType, index: Array, length: int, *arrays: Array) -> dict[str, Any]:
    width = 1 if any(a.data.ptr % 16 for a in arrays) else math.gcd(length, 16 // dtype.itemsize)
    return {"T": dtype, "I": index.dtype, "WIDTH": width}


def taken(k: Launcher, x: Array, index: Array) -> Array:
    """(outer, count, length): the rows of `x` (outer, rows, length) that `index` (count,) names."""
    x, index = k.contiguous(x), k.xp.ascontiguousarray(index)
    outer, rows, length = x.shape
    y = k.empty((outer, index.size, length), x.dtype)
    names = _names(x.dtype, index, length, x)
    packets = y.size // names["WIDTH"]
    sizes = (np.uint32(packets), np.int32(rows), *divisor(length // names["WIDTH"]), *divisor(index.size))
    k.launch_header(_HEADER, "taken", names, (-(-packets // (256 * _AHEAD)),), 256, (x, index, y, *sizes))
    return y


def summed(k: Launcher, values: Array, index: Array, rows: int) -> Array:
    """(rows, length): the sum of the rows of `values` (count, length) whose `index` (count,) is that row's.

    The order of the additions depends on `index` alone, so the bits are the same in every run.
    """
    values, index = k.contiguous(values), k.xp.ascontiguousarray(index)
    count, length = values.shape
    out = k.xp.zeros((rows, length), values.dtype)
    if count > _FEW:
        _sum_sorted(k, values, index, out)
        return out
    names = _names(values.dtype, index, length, values)
    grid = (count * -(-length // (_ACROSS * names["WIDTH"])),)
    numbers = map(np.int32, (count, rows, length))
    k.launch_header(_HEADER, "few_sums", names, grid, _ACROSS * _LANES, (index, values, out, *numbers))
    return out


def _sum_sorted(k: Launcher, values: Array, index: Array, out: Array) -> None:
    """Sums as `summed`, sorted first: beyond some hundred thousand indices sorting takes most of the time."""
    (count, length), n = values.shape, np.int32(len(values))
    names = _names(values.dtype, index, length, values)
    keys, sort = k.empty((count,), int64), (-(-count // _TILE),)
    k.launch_header(_HEADER, "sort_tiles", names, sort, _TILE // 2, (index, keys, n, np.int32(len(out))))
    if count > _TILE:
        tiles, keys = keys, k.empty((count,), int64)
        k.launch_header(_HEADER, "merge_tiles", names, (-(-count // 256),), 256, (tiles, keys, n))
    groups = -(-count // _GROUP)
    parts = k.empty((groups, 2, length), float32)
    grid, sizes = (groups * -(-length // (_ACROSS * names["WIDTH"])),), (n, np.int32(length))
    k.launch_header(_HEADER, "sums", names, grid, _ACROSS, (keys, values, out, parts, *sizes))
    k.launch_header(_HEADER, "join_sums", names, grid, _ACROSS, (keys, out, parts, *sizes))


_ELEMENTS_HEADER, _THREADS = "ops/indexing/index_elements.cuh", 256

_STEPS = 1 << 31  # of all elements' searches; beyond them the reference adds, in no fixed order


def no_elements_by_index(input: Array, dim: int, index: Array) -> str:
    """Says why the kernels cannot take elements of `input` at `index` along `dim`; "" if they can."""
    if index.dtype not in (int32, int64) or input.ndim != index.ndim or not -input.ndim <= dim < input.ndim:
        return "arguments that are refused, or other indices than int32 and int64"
    d = dim % input.ndim
    if input.shape[:d] != index.shape[:d] or input.shape[d + 1 :] != index.shape[d + 1 :]:
        return "index has another shape in a dim other than"
    steps = index.size * min(input.shape[d], index.shape[d])
    if 0 in (input.size, index.size) or max(steps, input.size, index.size) > _STEPS - _THREADS:
        return "nothing to take, or too much"
    return same(AT_MOST_FP32, input)


def elements(k: Launcher, x: Array, dim: int, index: Array) -> Array:
    """Returns x[..., index[..., i, ...], ...] along `dim`, in the shape of `index`."""
    d, y = dim % x.ndim, k.empty(index.shape, x.dtype)
    sizes = (y.size, x.shape[d], index.shape[d], math.prod(x.shape[d + 1 :]))
    args = (k.contiguous(x), k.xp.ascontiguousarray(index), y, *map(np.int32, sizes))
    names = {"T": x.dtype, "I": index.dtype, "SPAN": _THREADS}
    k.launch_header(_ELEMENTS_HEADER, "elements", names, (-(-y.size // _THREADS),), _THREADS, args)
    return y


def element_sums(k: Launcher, values: Array, dim: int, index: Array, shape: Shape, base: Array | None = None) -> Array:
    """Returns `base`, or zeros of `shape`, with `values` added at `index` along `dim`, in the order of positions.

    For each line along `dim` either its elements search for the indices that name them, or its indices for equal ones,
    whichever are fewer.

    Args:
        values: in index's shape.
        dim: the dim that is indexed.
        index: int32 or int64.
        base: what sums are added to, or None.
    """
    d, values = dim % len(shape), k.contiguous(values)
    rows, count, inner = shape[d], index.shape[d], math.prod(shape[d + 1 :])
    out = k.empty(shape, values.dtype) if rows < count or base is not None else k.xp.zeros(shape, values.dtype)
    if rows < count:
        start = np.int64(0) if base is None else k.contiguous(base)
        kernel, span, first, blocks = "element_sums", _THREADS, out.size, -(-out.size // _THREADS)
    else:
        if base is not None:
            k.copy([out], [base])
        start = np.int64(0) if base is None else out
        span, first = _span(count, inner), index.size // count
        kernel, blocks = "leader_sums", -(-first // (_THREADS // span)) * -(-count // span)
    names = {"T": values.dtype, "I": index.dtype, "SPAN": span}
    args = (values, k.xp.ascontiguousarray(index), start, out, *map(np.int32, (first, rows, count, inner)))
    k.launch_header(_ELEMENTS_HEADER, kernel, names, (blocks,), _THREADS, args)
    return out


def _span(count: int, inner: int) -> int:
    """Indices of a line to a block: with an inner dim few, so that lines side by side are read as they lie."""
    most = _THREADS if inner == 1 else 16
    return min(most, max(4, 1 << (count - 1).bit_length()))
