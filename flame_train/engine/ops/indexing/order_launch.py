"""The launch of the kernels of order: the first few of each row, and gradients put where their values stood."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, int64
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape

_HEADER, _HELD = "ops/indexing/order.cuh", 4096  # as in that header


def _threads(n: int) -> int:
    return 256 if n <= 8192 else 1024


def no_first(input: Array, k: int, dim: int) -> str:
    """Why the kernel cannot find the first `k` of `input` along `dim`; "" if it can."""
    if not input.size or not input.ndim or isinstance(dim, bool) or dim not in (-1, input.ndim - 1):
        return "nothing to order, or another dim than the last"
    n = input.shape[-1]
    if not 0 < k <= min(n, _threads(n)) or n >= 2**31 - 2**16:
        return "none, or too many"
    width = math.gcd(n, 16 // input.itemsize)
    if k * width * -(-n // (width * _threads(n))) > _HELD:
        return f"{k} of {n} may take more shared memory than there is"
    return same(AT_MOST_FP32, input)


def first(launcher: Launcher, x: Array, k: int, largest: bool) -> tuple[Array, Array]:
    """The `k` largest, or smallest, of each row of `x` in order, and their places, int64."""
    x, n = launcher.contiguous(x), x.shape[-1]
    values, index = (launcher.empty((*x.shape[:-1], k), d) for d in (x.dtype, int64))
    width = math.gcd(n, 16 // x.itemsize)
    names = _names(x) | {"WIDTH": width, "THREADS": _threads(n), "LARGEST": int(largest)}
    args = (x, values, index, np.int32(n), np.int32(k))
    launcher.launch_header(_HEADER, "topk", names, (x.size // n,), _threads(n), args)
    return values, index


def no_places(input: Array, dim: int) -> str:
    """Why the kernel cannot put gradients back along `dim` of `input`; "" if it can."""
    if not input.size or not input.ndim or not -input.ndim <= dim < input.ndim or max(input.shape) >= 2**31:
        return "nothing to put, or arguments that are refused"
    return same(AT_MOST_FP32, input)


def placed(launcher: Launcher, g: Array, index: Array, dim: int, shape: Shape) -> Array:
    """An array of `shape`: `g` at `index` along `dim`, where no place is named twice, and zeros elsewhere.

    Args:
        launcher: launches kernels.
        g: the values.
        index: int64, in g's shape.
        dim: the dim that is indexed.
        shape: the shape of the result.

    Returns:
        The array.
    """
    d, g, index = dim % len(shape), launcher.contiguous(g), launcher.contiguous(index)
    out = launcher.empty(shape, g.dtype) if g.shape == shape else launcher.xp.zeros(shape, g.dtype)
    if g.size:
        sizes = (np.int32(shape[d]), np.int32(g.shape[d]), np.int32(math.prod(shape[d + 1 :])))
        args = (g, index, out, np.int64(g.size), *sizes)
        launcher.launch_header(_HEADER, "placed", _names(g), (-(-g.size // 256),), 256, args)
    return out


def _names(x: Array) -> dict[str, Any]:
    """The header's constants, for kernels that do not use them."""
    return {"T": x.dtype, "WIDTH": 1, "THREADS": 32, "LARGEST": 1}
