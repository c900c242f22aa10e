"""When attention_few_keys.cu is used, and how it is launched: attention to few keys, such as a caption's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtype import Array
from .attention_memory import in_packets, placed

_HEAD, _KEYS, _QUERIES, _THREADS = 64, 80, 64, 128  # as in that file
_FORWARD_BLOCKS = 4  # blocks that a multiprocessor holds at once
_FORWARD_BYTES = 2 * (_HEAD + 8) * (2 * _KEYS + 2 * _QUERIES)  # shared memory of a block
_SHARES = (2, 4, 8)  # possible numbers of blocks in a cluster, which share a head
_BLOCKS = 2  # as _FORWARD_BLOCKS, for the gradients
_SHARED_BYTES = 2 * (_HEAD + 8) * (2 * _KEYS + 4 * _QUERIES) + 2 * 2 * _QUERIES * (_KEYS + 8) + 2 * 4 * _QUERIES


def unfit(query: Array, key: Array, is_causal: bool, scale: float | None) -> str:
    """Why the kernel does not replace cuDNN's; "" if it does."""
    keys = key.shape[-2]
    if query.shape[-1] != _HEAD or keys > _KEYS:
        return f"{keys} keys of size {query.shape[-1]}: expected at most {_KEYS} of {_HEAD}"
    if is_causal:
        return "no causal mask"
    return "" if int(query.device.compute_capability) >= 90 else "clusters need compute capability 9.0"


def forward(k: Any, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float) -> None:
    """Fills `out` and the rows' log-sum-exp for (B, H, L, E) query and (B, H, S, E) key and value."""
    b, heads, length, _ = query.shape
    of_head = max(1, min(-(-length // _QUERIES), _FORWARD_BLOCKS * k.multiprocessors // (b * heads)))
    arrays = *(in_packets(k, x) for x in (query, key, value)), out
    numbers = (*map(np.int32, (heads, length, key.shape[2])), np.float32(scale))
    k.launch(
        "attention_few_keys.cu", "few_keys_forward", query.dtype, (b * heads, of_head), _THREADS,
        (*placed(arrays), lse, *numbers), _FORWARD_BYTES,
    )  # fmt: skip


def gradients(
    k: Any, g: Array, query: Array, key: Array, value: Array, lse: Array, into: tuple[Array, Array, Array],
    scale: float,
) -> None:  # fmt: skip
    """Fills `into` with the gradients at (B, H, L, E) query and (B, H, S, E) key and value."""
    (b, heads, length, _), keys = query.shape, key.shape[2]
    arrays = *(in_packets(k, x) for x in (query, key, value, g)), *into
    share = next((s for s in _SHARES if b * heads * s >= _BLOCKS * k.multiprocessors), _SHARES[-1])
    numbers = (*map(np.int32, (heads, length, keys)), np.float32(scale))
    k.launch(
        "attention_few_keys.cu", f"few_keys_gradients_{share}", query.dtype, (b * heads, share), 2 * _THREADS,
        (*placed(arrays), lse, *numbers), _SHARED_BYTES,
    )  # fmt: skip
