"""When tiled.cuh is used, and how it is launched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ..common import conditions
from .operands import Inputs

_THREADS = {64: 128, 128: 128, 256: 128, 512: 256}  # by the largest head size of a file: its THREADS
_ROWS = 64  # rows of a tile


def forward_tiles(inputs: Inputs, dropout_p: float) -> str:
    """Says why our forward kernel is not used; "" if it is. Its head sizes follow from measurements, see docs/log/."""
    if reason := _why_not(inputs, dropout_p):
        return reason
    query, keys = inputs.query, inputs.key.shape[-2]
    sizes = query.shape[-1], inputs.value.shape[-1]
    if max(sizes) > 512 or (max(sizes) > 256 and not inputs.is_causal):
        return f"head sizes {sizes[0]} and {sizes[1]}: at most 256, causal 512, or products are faster"
    return _idle(query, keys * max(sizes))


def backward_tiles(inputs: Inputs, dropout_p: float) -> str:
    """Says why our gradient kernels are not used; "" if they are. Those of key and value have tiles of keys."""
    if reason := _why_not(inputs, dropout_p):
        return reason
    query, key = inputs.query, inputs.key
    sizes = query.shape[-1], inputs.value.shape[-1]
    if max(sizes) > 256 or (max(sizes) > 128 and not inputs.is_causal):
        return f"head sizes {sizes[0]} and {sizes[1]}: at most 128, causal 256, or products are faster"
    queries = math.prod(query.shape[:-1]) // math.prod(key.shape[:-2])
    return _idle(query, key.shape[-2] * max(sizes)) or _idle(key, queries * max(sizes))


def _why_not(inputs: Inputs, dropout_p: float) -> str:
    """Says why tiled.cuh cannot take these arguments; "" if it can."""
    query, key, value, attn_mask = inputs.query, inputs.key, inputs.value, inputs.attn_mask
    if dropout_p:
        return "dropout takes the reference"
    if inputs.key_value_seq_lengths is not None:
        return "lengths of keys take the reference"
    if min(query.ndim, key.ndim, value.ndim) < 2 or query.ndim > 4 or 0 in (*query.shape, *key.shape, *value.shape):
        return "only (L, E) up to (B, H, L, E), and not empty"
    if attn_mask is not None and (attn_mask.ndim < 2 or attn_mask.dtype not in (np.dtype(bool), query.dtype)):
        return "a mask of another dtype than the query's, or of one dim"
    return conditions.same(conditions.AT_MOST_FP32, query, key, value)


def _idle(x: Array, work: int) -> str:
    """Says why the tiles of the rows of `x` are too few: with much `work` each, most of a GPU idles."""
    tiles = -(-x.shape[-2] // _ROWS) * math.prod(x.shape[:-2])
    return f"{tiles} tiles for a whole GPU: products spread better" if tiles < 128 and work > 1 << 15 else ""


class Problem:
    """The arguments of tiled.cuh's kernels for one call: dense arrays, and the numbers after them."""

    def __init__(self, k: Launcher, inputs: Inputs, *others: Array) -> None:
        query, key, value, attn_mask = inputs.query, inputs.key, inputs.value, inputs.attn_mask
        self.k, self.dtype = k, query.dtype
        self.q, self.key, self.value, *self.others = (k.contiguous(x) for x in (query, key, value, *others))
        self.heads = math.prod(query.shape[:-2]), math.prod(key.shape[:-2])
        sizes = (*query.shape[-2:], *value.shape[-2:])  # L, E, S, V
        aligned = all(x.data.ptr % 16 == 0 for x in (self.q, self.key, self.value, *self.others))
        wide = aligned and sizes[1] % 4 == 0 and sizes[3] % 4 == 0
        self.mask, kind, strides = nowhere(), 0, (0, 0, 0, 0)
        if attn_mask is not None:
            full = (1,) * (4 - query.ndim) + (*query.shape[:-1], key.shape[-2])
            self.mask, kind = attn_mask, 1 if attn_mask.dtype == bool else 2
            strides = tuple(n // attn_mask.itemsize for n in k.xp.broadcast_to(attn_mask, full).strides)
        groups = query.shape[-3] if query.ndim > 2 else 1, self.heads[0] // self.heads[1]
        ints = (kind, inputs.is_causal, wide, *groups, sizes[0], sizes[2], sizes[1], sizes[3])
        self.numbers = (*map(np.int32, ints), *map(np.int64, strides), np.float32(inputs.factor))
        head = next(c for c in _THREADS if max(sizes[1], sizes[3]) <= c)
        self.file, self.threads = f"ops/attention/tiled_{head}.cu", _THREADS[head]

    def run(self, kernel: str, g: Any, lse: Array, delta: Any, out: Array) -> Array:
        """Fills `out`, for whose rows the kernel has a block each tile, and returns it.

        Args:
            kernel: the kernel's name.
            g: the gradient of the result (..., L, V); `nowhere()` in the forward pass.
            delta: what the method of that name returns; `nowhere()` in the forward pass.
        """
        grid = (-(-out.shape[-2] // _ROWS) * math.prod(out.shape[:-2]),)
        arrays = (self.q, self.key, self.value, g, lse, delta, self.mask, out)
        self.k.launch(self.file, kernel, self.dtype, grid, self.threads, (*arrays, *self.numbers))
        return out

    def delta(self, g: Array, out: Array) -> Array:
        """sum(g * out) over each query's row, fp32 (..., L, 1)."""
        result = self.k.empty((*out.shape[:-1], 1), np.dtype(np.float32))
        sizes = (np.int32(result.size), np.int32(out.shape[-1]))
        self.k.launch(self.file, "attention_drop", self.dtype, (-(-result.size // 4),), 128, (g, out, result, *sizes))
        return result


def nowhere() -> Any:
    """Returns a null pointer, for an argument that a kernel does not read."""
    return np.uint64(0)
