"""When attention_few_keys.cu is asked, and how: gradients of attention to a caption's keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtype import Array

_HEAD, _KEYS, _QUERIES, _THREADS = 64, 80, 64, 128  # as there
_SHARES = (2, 4, 8)  # blocks of a cluster, which share a head
_BLOCKS = 2  # a multiprocessor holds at once
_SHARED_BYTES = 2 * (_HEAD + 8) * (2 * _KEYS + 4 * _QUERIES) + 2 * 2 * _QUERIES * (_KEYS + 8)


def few_keys(query: Array, key: Array, is_causal: bool) -> str:
    """Why the kernel is not asked for what cuDNN could do as well; empty when it is."""
    if query.shape[-1] != _HEAD or key.shape[-2] > _KEYS:
        return f"{key.shape[-2]} keys of size {query.shape[-1]}: expected at most {_KEYS} of {_HEAD}"
    if is_causal:
        return "no causal mask"
    return "" if int(query.device.compute_capability) >= 90 else "clusters need compute capability 9.0"


def gradients(
    k: Any, g: Array, query: Array, key: Array, value: Array, lse: Array, into: tuple[Array, Array, Array], scale: float
) -> None:  # fmt: skip
    """Fills `into` with the gradients at (B, H, L, E) query and (B, H, S, E) key and value."""
    (b, heads, length, _), keys = query.shape, key.shape[2]
    arrays = (*(_in_packets(k, x) for x in (query, key, value, g)), *into)
    steps = ([np.int64(s // x.itemsize) for s in x.strides[:3]] for x in arrays)
    placed = [v for x, three in zip(arrays, steps, strict=True) for v in (x, *three)]
    share = next((s for s in _SHARES if b * heads * s >= _BLOCKS * k.multiprocessors), _SHARES[-1])
    numbers = (*map(np.int32, (heads, length, keys)), np.float32(scale))
    k.launch(
        "attention_few_keys.cu", f"few_keys_gradients_{share}", query.dtype, (b * heads, share), _THREADS,
        (*placed, lse, *numbers), _SHARED_BYTES,
    )  # fmt: skip


def _in_packets(k: Any, x: Array) -> Array:
    """`x` where rows can be read 16 bytes at a time."""
    dense = x.strides[-1] == x.itemsize
    return x if dense and not any(n % 16 for n in (x.data.ptr, *x.strides[:-1])) else k.rows_first(x)
