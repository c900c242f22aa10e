"""How attention's arrays lie in memory: so that merging heads copies nothing, and one product reads all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from .operands import Inputs


def unit(k: Launcher, x: Array) -> Array:
    """Returns `x` with a dense last dim, which is all that cuDNN demands of strides: itself, or a copy."""
    return x if x.strides[-1] == x.itemsize else k.contiguous(x)


def lies_in_packets(x: Array) -> bool:
    """Tells whether rows are dense and 16-byte aligned, and so can be read and written 16 bytes at a time."""
    return x.strides[-1] == x.itemsize and not any(n % 16 for n in (x.data.ptr, *x.strides[:-1]))


def in_packets(k: Launcher, x: Array) -> Array:
    """Returns `x` if it `lies_in_packets`, else a copy that does."""
    return x if lies_in_packets(x) else k.contiguous(x)


def placed(arrays: Iterable[Array]) -> list[Any]:
    """Returns a kernel's arguments for arrays (B, H, L, E): each, followed by its strides of B, H and L in elements."""
    return [given for x in arrays for given in (x, *(np.int64(s // x.itemsize) for s in x.strides[:3]))]


def like_rows(k: Launcher, x: Array, width: int | None = None) -> Array:
    """Returns memory for (B, H, L, E), or `width`, laid out as (B, L, H, E), so that merging heads copies nothing."""
    b, h, length, e = x.shape
    return k.empty((b, length, h, width or e), x.dtype).transpose(0, 2, 1, 3)


def _rows_together(k: Launcher, *arrays: Array) -> list[Array]:
    """Makes each as `like_rows`, rows of a position side by side if shapes agree, so that one product reads them."""
    if len({x.shape for x in arrays}) != 1:
        return [like_rows(k, x) for x in arrays]
    b, h, length, e = arrays[0].shape
    block = k.empty((b, length, len(arrays), h, e), arrays[0].dtype)
    return [block[:, :, i].transpose(0, 2, 1, 3) for i in range(len(arrays))]


def gradient_memory(k: Launcher, inputs: Inputs, targets: GradTargets) -> list[Array]:
    """Memory for the gradients of query, key and value: the targets' where kernels can write to it, else new."""
    buffers = {n: t.buffer for n, t in targets.items() if t.buffer is not None}
    places = {n: buffer for n, buffer in buffers.items() if lies_in_packets(buffer)}
    wanted = (("query", inputs.query), ("key", inputs.key), ("value", inputs.value))
    rest = {n: x for n, x in wanted if n not in places}
    made = {**places, **dict(zip(rest, _rows_together(k, *rest.values()), strict=True))}
    return [made["query"], made["key"], made["value"]]


_TILE, _THREADS, _THREADS_A_QUERY = 64, 256, 8  # as in that file


def query_factors(k: Launcher, g: Array, out: Array, lse: Array) -> Array:
    """Returns -lse in units of log 2 and -sum(g out) of each query, fp32 (B * H, tiles of 64 queries, 2, 64).

    Minus infinity and 0 up to a whole tile.

    Args:
        g, out: the result and its gradient, (B, H, L, V), which lie in packets, see `layout.lies_in_packets`.
    """
    b, heads, length, width = out.shape
    tiles = -(-length // _TILE)
    factors = k.empty((b * heads, tiles, 2, _TILE), np.dtype(np.float32))
    blocks = -(-b * heads * tiles * _TILE * _THREADS_A_QUERY // _THREADS)
    numbers = map(np.int32, (b, heads, length, width))
    args = (*placed((g, out)), lse, factors, *numbers)
    k.launch("ops/attention/factors.cu", "attention_factors", g.dtype, (blocks,), _THREADS, args)
    return factors


def forward_flops(query: Array, key: Array, value: Array) -> int:
    """Of the scores, and of what is found."""
    return 2 * _scores(query, key) * (int(query.shape[-1]) + int(value.shape[-1]))


def backward_flops(query: Array, key: Array, value: Array) -> int:
    """Of the scores once more, of the queries' and keys' gradients, of the probabilities' and of the values'."""
    return 2 * _scores(query, key) * (3 * int(query.shape[-1]) + 2 * int(value.shape[-1]))


def _scores(query: Array, key: Array) -> int:
    return math.prod(query.shape[:-1]) * int(key.shape[-2])
