"""The launch of the kernels that find extremes along a dim and where they are."""

from __future__ import annotations

import math

import numpy as np

from ...backend.cuda.codegen.column_tiling import column_tiling
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, int32, int64
from ..common.conditions import AT_MOST_FP32, same

_HEADER, _THREADS = "ops/reduction/extreme.cuh", 256
_LEAST = 2 * _THREADS  # packets of a row that are worth a block of their own


def no_extreme(input: Array, dim: int | None) -> str:
    """Why the kernels cannot take `input` along `dim`, None being all of it; "" if they can."""
    if not input.size or not input.ndim or isinstance(dim, bool):
        return "no values, a single one, or arguments that are refused"
    if dim is not None and not -input.ndim <= dim < input.ndim:
        return "arguments that are refused"
    if (input.size if dim is None else input.shape[dim]) >= 2**31 - 2**16:
        return "places beyond 32 bits"
    return same(AT_MOST_FP32, input)


def extremes(k: Launcher, x: Array, dim: int | None, *, largest: bool, values: bool) -> tuple[Array | None, Array]:
    """The largest, or smallest, values of `x` along `dim` where `values` are wanted, and their first places, int64.

    Both have x's shape with `dim` of size 1; without `dim` all of x is one row.

    Args:
        k: launches kernels.
        x: what `no_extreme` takes.
        dim: the dim; None: all of them.
        largest: whether the largest are found, else the smallest.
        values: whether the values are returned.

    Returns:
        The values or None, and the places.
    """
    x, d = k.contiguous(x), 0 if dim is None else dim % x.ndim
    kept = tuple(1 if dim is None or i == d else n for i, n in enumerate(x.shape))
    outer, n, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
    if dim is None:
        n, inner = x.size, 1
    width = 1 if x.data.ptr % 16 else math.gcd(n if inner == 1 else inner, 16 // x.itemsize)
    index, found = k.empty(kept, int64), k.empty(kept, x.dtype) if values else None
    names = {"T": x.dtype, "WIDTH": width, "LARGEST": int(largest), "THREADS": 32, "ACROSS": 32, "LANES": 1}
    made = (x, index, np.int64(0) if found is None else found)
    if inner == 1:
        packets = n // width
        threads = _THREADS if packets > _THREADS else min(32, 1 << (packets - 1).bit_length())
        wanted = -(-2 * k.multiprocessors // outer) if threads == _THREADS else 1
        stretch = max(-(-packets // wanted), _LEAST) * width
        count, rows = -(-n // stretch), _THREADS // threads
        args = (*made, *_left(k, outer * count, count), np.int64(outer), np.int32(n), np.int32(stretch))
        grid = (-(-outer // rows), count)
        k.launch_header(_HEADER, "extreme_of_rows", names | {"THREADS": threads}, grid, _THREADS, args)
        return found, index
    tiling = column_tiling(inner, n, width, x.itemsize)
    tiles = tiling.tiles(inner)
    stretch = tiling.stretch(n, tiles * outer, k.multiprocessors)
    count = -(-n // stretch)
    left = _left(k, outer * tiles * count * tiling.columns, count)
    names |= {"ACROSS": tiling.across, "LANES": tiling.lanes}
    args = (*made, *left, *map(np.int32, (n, stretch, inner)))
    k.launch_header(_HEADER, "extreme_of_columns", names, (outer, count, tiles), tiling.threads, args)
    return found, index


def _left(k: Launcher, size: int, count: int) -> tuple[Array, Array, Array]:
    """Memory for what `count` blocks that share a row leave, values and places, and counters of those that finished."""
    if count == 1:
        return np.int64(0), np.int64(0), k.columns.counters
    return k.empty((size,), float32), k.empty((size,), int32), k.columns.counters
