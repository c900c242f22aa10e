"""Kernels that take rows by index, and that add rows at an index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...backend.cuda.codegen.rows import divisor
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, float32, int32, int64
from ..common.conditions import AT_MOST_FP32, same

_HEADER, _TILE, _GROUP, _ACROSS, _LANES, _AHEAD = "ops/indexing/index_rows.cuh", 2048, 64, 64, 8, 2  # as in that header
_FEW = 1024  # as there: up to so many indices are compared with each other; more are sorted


def no_rows_by_index(x: Array, index: Array) -> str:
    """Why the kernels cannot take rows of `x` at `index`; "" if they can."""
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
    """`summed` into `out`, with the indices sorted first.

    Sorting takes time that grows with the square of count / 2048: beyond some hundred thousand indices, most of it.
    """
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
