"""What gradients on tensor cores need of each query, by factors.cu."""

from __future__ import annotations

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from .layout import placed

_TILE, _THREADS, _THREADS_A_QUERY = 64, 256, 8  # as in that file


def query_factors(k: Launcher, g: Array, out: Array, lse: Array) -> Array:
    """-lse in units of log 2 and -sum(g out) of each query, fp32 (B * H, tiles of 64 queries, 2, 64).

    Minus infinity and 0 up to a whole tile.

    Args:
        g, out: the result and its gradient, (B, H, L, V), which lie in packets, see `layout.lies_in_packets`.
        lse: the log-sum-exps, fp32 (B, H, L, 1).

    Returns:
        The factors.
    """
    b, heads, length, width = out.shape
    tiles = -(-length // _TILE)
    factors = k.empty((b * heads, tiles, 2, _TILE), np.dtype(np.float32))
    blocks = -(-b * heads * tiles * _TILE * _THREADS_A_QUERY // _THREADS)
    numbers = map(np.int32, (b, heads, length, width))
    args = (*placed((g, out)), lse, factors, *numbers)
    k.launch("ops/attention/factors.cu", "attention_factors", g.dtype, (blocks,), _THREADS, args)
    return factors
