"""Kernels for rows and elements that are taken by index, and for those that are added up by index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..dtype import Array, DType, float32, int32, int64
from .conditions import AT_MOST_FP32, same

_HEADER, _GROUP, _ACROSS = "index.cuh", 64, 64  # as there
_STEPS = 1 << 31  # of all elements' searches; beyond them the reference adds, in no fixed order


def no_rows_by_index(x: Array, index: Array) -> str:
    """Why the kernels cannot take rows of `x`."""
    if index.dtype not in (int32, int64):
        return f"no kernel for indices in {index.dtype.name}"
    if 0 in (x.size, index.size) or x.size >= 2**31 or x.size // max(x.shape) * index.size >= 2**31:
        return "nothing to take, or too much"
    return same(AT_MOST_FP32, x)


def _names(dtype: DType, index: Array, length: int, *arrays: Array, tile: int = 2) -> dict[str, Any]:
    width = 1 if any(a.data.ptr % 16 for a in arrays) else math.gcd(length, 16 // dtype.itemsize)
    return {"T": dtype, "I": index.dtype, "WIDTH": width, "TILE": tile}


def taken(k: Any, x: Array, index: Array) -> Array:
    """Of `x` (outer, rows, length) those rows that `index` (count,) names: (outer, count, length)."""
    x, index = k.rows_first(x), k.xp.ascontiguousarray(index)
    outer, rows, length = x.shape
    y = k.empty((outer, index.size, length), x.dtype)
    names = _names(x.dtype, index, length, x)
    packets = y.size // names["WIDTH"]
    numbers = map(np.int32, (packets, rows, index.size, length))
    k.launch_typed(_HEADER, "taken", names, (-(-packets // 256),), 256, (x, index, y, *numbers))
    return y


def summed(k: Any, values: Array, index: Array, rows: int) -> Array:
    """(rows, length): the rows of `values` (count, length), each added where `index` (count,) says.

    The order of the additions is that of the places. What it costs to sort grows with the square of count / 2048, and
    is beyond some hundred thousand places what takes longest.
    """
    values, index = k.rows_first(values), k.xp.ascontiguousarray(index)
    count, length = values.shape
    tile = min(2048, max(64, 1 << (count - 1).bit_length()))
    names = _names(values.dtype, index, length, values, tile=tile)
    keys, n = k.empty((count,), int64), np.int32(count)
    k.launch_typed(_HEADER, "sort_tiles", names, (-(-count // tile),), tile // 2, (index, keys, n, np.int32(rows)))
    if count > tile:
        tiles, keys = keys, k.empty((count,), int64)
        k.launch_typed(_HEADER, "merge_tiles", names, (-(-count // 256),), 256, (tiles, keys, n))
    out, groups = k.xp.zeros((rows, length), values.dtype), -(-count // _GROUP)
    parts = k.empty((groups, 2, length), float32)
    grid, sizes = (groups * -(-length // (_ACROSS * names["WIDTH"])),), (n, np.int32(length))
    k.launch_typed(_HEADER, "sums", names, grid, _ACROSS, (keys, values, out, parts, *sizes))
    if groups > 1:
        k.launch_typed(_HEADER, "join_sums", names, grid, _ACROSS, (keys, out, parts, *sizes))
    return out


def no_elements_by_index(x: Array, dim: int, index: Array) -> str:
    """Why the kernels cannot take elements of `x` along `dim`."""
    if index.dtype not in (int32, int64) or not x.ndim or x.ndim != index.ndim or not -x.ndim <= dim < x.ndim:
        return "arguments that are refused, or other indices than int32 and int64"
    d = dim % x.ndim
    if x.shape[:d] != index.shape[:d] or x.shape[d + 1 :] != index.shape[d + 1 :]:
        return "index has another shape beside dim"
    if 0 in (x.size, index.size) or max(x.size * index.shape[d], index.size) > _STEPS - 256:
        return "nothing to take, or too much"
    return same(AT_MOST_FP32, x)


def _along(k: Any, x: Array, dim: int, index: Array) -> tuple[dict[str, Any], Array, tuple[Any, ...]]:
    """Types, dense indices, and the sizes (rows, count, inner) of taking `index` of `x` along `dim`."""
    d = dim % x.ndim
    sizes = (x.shape[d], index.shape[d], math.prod(x.shape[d + 1 :]))
    return _names(x.dtype, index, 1), k.xp.ascontiguousarray(index), tuple(map(np.int32, sizes))


def elements(k: Any, x: Array, dim: int, index: Array) -> Array:
    """x[..., index[..., i, ...], ...] along `dim`, in the shape of `index`."""
    names, index, sizes = _along(k, x, dim, index)
    y = k.empty(index.shape, x.dtype)
    args = (k.rows_first(x), index, y, np.int32(y.size), *sizes)
    k.launch_typed(_HEADER, "elements", names, (-(-y.size // 256),), 256, args)
    return y


def element_sums(k: Any, values: Array, dim: int, index: Array, out: Array, base: Array | None = None) -> Array:
    """`out`, filled with `base` or zeros and `values` added at `index` along `dim`, in the order of their places."""
    names, index, sizes = _along(k, out, dim, index)
    start = np.int64(0) if base is None else k.rows_first(base)
    args = (k.rows_first(values), index, start, out, np.int32(out.size), *sizes)
    k.launch_typed(_HEADER, "element_sums", names, (-(-out.size // 256),), 256, args)
    return out
