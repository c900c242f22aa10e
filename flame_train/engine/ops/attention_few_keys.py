"""When attention_few_keys.cu is asked, and how: attention to a caption's keys, or to the last of many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..dtype import Array
from ..mode import mode
from .attention_memory import in_packets

_HEAD, _KEYS, _QUERIES, _THREADS = 64, 80, 64, 128  # as there
_FORWARD_BLOCKS = 4  # a multiprocessor holds at once
_FORWARD_BYTES = 2 * (_HEAD + 8) * (2 * _KEYS + 2 * _QUERIES)  # of shared memory
_SHARES = (2, 4, 8)  # blocks of a cluster, which share a head
_BLOCKS = 2  # a multiprocessor holds at once
_SHARED_BYTES = 2 * (_HEAD + 8) * (2 * _KEYS + 4 * _QUERIES) + 2 * 2 * _QUERIES * (_KEYS + 8) + 2 * 4 * _QUERIES
_WHOLE, _MASKED = 128, 64  # keys of a tile of cuDNN's forward kernel, and of those that its gradients mask together
_MANY = 2048  # keys, from which on another pass over the queries is the lesser evil


def few_keys(query: Array, key: Array, is_causal: bool) -> str:
    """Why the kernel is not asked for what cuDNN could do as well; empty when it is."""
    return _unfit(query, key.shape[-2], is_causal)


def last_keys(query: Array, key: Array, is_causal: bool) -> str:
    """Why cuDNN is asked for all keys instead of whole tiles of them; empty where the rest is left to the kernel.

    cuDNN's forward kernels for heads of 64 take an eighth longer for the same work where the last tile of keys is not
    full, which from some length on is more than another pass over the queries (docs/log.md).
    """
    keys = key.shape[-2]
    if keys < _MANY or keys % _WHOLE == 0:
        return f"{keys} keys: expected at least {_MANY}, and not a multiple of {_WHOLE}"
    return _unfit(query, keys % _WHOLE, is_causal)


def last_keys_gradients(query: Array, key: Array, is_causal: bool) -> str:
    """The same of the gradients, whose kernel asks of 64 keys at a time whether they are there."""
    if mode().deterministic:
        return "cuDNN's own pass for queries gains nothing by it"
    if key.shape[-2] % _MASKED == 0:
        return f"{key.shape[-2]} keys: a multiple of {_MASKED}"
    return last_keys(query, key, is_causal)


def whole_and_rest(x: Array) -> tuple[Array, Array]:
    """Of keys (B, H, S, E), or what there is of each, those that fill cuDNN's tiles and those that do not."""
    whole = x.shape[-2] // _WHOLE * _WHOLE
    return x[..., :whole, :], x[..., whole:, :]


def _unfit(query: Array, keys: int, is_causal: bool) -> str:
    if query.shape[-1] != _HEAD or keys > _KEYS:
        return f"{keys} keys of size {query.shape[-1]}: expected at most {_KEYS} of {_HEAD}"
    if is_causal:
        return "no causal mask"
    return "" if int(query.device.compute_capability) >= 90 else "clusters need compute capability 9.0"


def forward(
    k: Any, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float, last: bool = False
) -> None:  # fmt: skip
    """Fills `out` and the rows' log-sum-exp for (B, H, L, E) query and (B, H, S, E) key and value.

    With `last` they hold what was found in keys before these, and are brought up to all.
    """
    b, heads, length, _ = query.shape
    of_head = max(1, min(-(-length // _QUERIES), _FORWARD_BLOCKS * k.multiprocessors // (b * heads)))
    arrays = *(in_packets(k, x) for x in (query, key, value)), out
    numbers = (*map(np.int32, (heads, length, key.shape[2])), np.float32(scale), np.int32(last))
    k.launch(
        "attention_few_keys.cu", "few_keys_forward", query.dtype, (b * heads, of_head), _THREADS,
        (*_placed(arrays), lse, *numbers), _FORWARD_BYTES,
    )  # fmt: skip


def gradients(
    k: Any, g: Array, query: Array, key: Array, value: Array, lse: Array, into: tuple[Array, Array, Array],
    scale: float, out: Array | None = None,
) -> None:  # fmt: skip
    """Fills `into` with the gradients at (B, H, L, E) query and (B, H, S, E) key and value.

    With `out`, what was found in these keys and others before them, the first holds the gradient by those and is added
    to.
    """
    (b, heads, length, _), keys = query.shape, key.shape[2]
    arrays = (*(in_packets(k, x) for x in (query, key, value, g)), out if out is None else in_packets(k, out), *into)
    share = next((s for s in _SHARES if b * heads * s >= _BLOCKS * k.multiprocessors), _SHARES[-1])
    numbers = (*map(np.int32, (heads, length, keys)), np.float32(scale))
    k.launch(
        "attention_few_keys.cu", f"few_keys_gradients_{share}", query.dtype, (b * heads, share), 2 * _THREADS,
        (*_placed(arrays), lse, *numbers), _SHARED_BYTES,
    )  # fmt: skip


def _placed(arrays: Iterable[Array | None]) -> list[Any]:
    """Each array and the distances of its batches, heads and rows, in elements; null and zeros for none."""
    placed: list[Any] = []
    for x in arrays:
        placed += [np.uint64(0), *[np.int64(0)] * 3] if x is None else [x, *_steps(x)]
    return placed


def _steps(x: Array) -> list[np.int64]:
    return [np.int64(s // x.itemsize) for s in x.strides[:3]]
