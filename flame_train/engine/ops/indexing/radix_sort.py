"""The launch of the kernels that put rows in order: short ones whole in shared memory, longer ones tile by tile."""

from __future__ import annotations

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, bfloat16, float16, float32, int32, int64
from ..common.conditions import AT_MOST_FP32, same

_HEADER = "ops/indexing/radix_sort.cuh"
_DIGITS, _BLOCK, _SCANNING, _ITEMS = 256, 256, 1024, 16  # as in that header; the most values of a thread
_TILE = _BLOCK * _ITEMS
_INFINITY = {float32: 0x7F800000, bfloat16: 0x7F80, float16: 0x7C00}


def no_sort(input: Array, dim: int) -> str:
    """Why the kernels cannot put `input` in order along `dim`; "" if they can."""
    if not input.size or not input.ndim or isinstance(dim, bool) or not -input.ndim <= dim < input.ndim:
        return "nothing to order, or arguments that are refused"
    n = input.shape[dim]
    if n >= 2**31 - 2**16 or input.size // n * -(-n // _TILE) >= 2**31:
        return "places beyond 32 bits"
    return same(AT_MOST_FP32, input)


def sorted_along(launcher: Launcher, x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """The values of `x` along `dim` in rising, or falling, order, and their places, int64.

    Equal values stay in their order.
    """
    dims = [d for d in range(x.ndim) if d != dim % x.ndim]
    to_last = [*dims, dim % x.ndim]
    values, index = _sorted_rows(launcher, launcher.contiguous(x.transpose(to_last)), descending)
    back = [to_last.index(d) for d in range(x.ndim)]
    return launcher.contiguous(values.transpose(back)), launcher.contiguous(index.transpose(back))


def _sorted_rows(launcher: Launcher, x: Array, descending: bool) -> tuple[Array, Array]:
    """As `sorted_along`, along the last dim of dense `x`.

    A pass orders by eight bits. Passes write to memory of their own and to the results' in turns, to these the last.
    """
    n = x.shape[-1]
    rows, tiles = x.size // n, -(-n // _TILE)
    values, index = launcher.empty(x.shape, x.dtype), launcher.empty(x.shape, int64)
    items = _ITEMS if tiles > 1 else 1 << (-(-n // _BLOCK) - 1).bit_length()
    names = {"T": x.dtype, "ITEMS": items, "DESCENDING": int(descending), "INFINITY_BITS": _INFINITY[x.dtype]}
    if tiles == 1:
        launcher.launch_header(_HEADER, "sort_short_rows", names, (rows,), _BLOCK, (x, values, index, np.int32(n)))
        return values, index
    other, places = launcher.empty(x.shape, x.dtype), launcher.empty(x.shape, int32)
    counts = launcher.empty((rows, tiles, _DIGITS), int32)
    null, of_row = np.int64(0), np.int32(tiles)
    read: tuple[Array, Array] = (x, null)
    for i in range(x.itemsize):
        sizes = (np.int32(n), of_row, np.int32(8 * i))
        written = (values, index.view(int32)) if i % 2 else (other, places)
        ends = (null, index) if i == x.itemsize - 1 else (written[1], null)
        launcher.launch_header(_HEADER, "count_digits", names, (rows * tiles,), _BLOCK, (read[0], counts, *sizes))
        launcher.launch_header(_HEADER, "place_digits", names, (rows,), _SCANNING, (counts, of_row))
        args = (*read, written[0], *ends, counts, *sizes)
        launcher.launch_header(_HEADER, "move_by_digits", names, (rows * tiles,), _BLOCK, args)
        read = written
    return values, index
