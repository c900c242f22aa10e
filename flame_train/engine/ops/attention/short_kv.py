"""When short_kv_forward.cuh and short_kv_gradients.cuh are used, and how they are launched: for a caption's keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...backend.cuda.hopper import tensor_map, warpgroup_product
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.nvrtc import included, struct
from ...backend.cuda.tuning import SM_90
from ...dtype import Array, DType
from .memory_layout import backward_flops, forward_flops, in_packets
from .operands import Inputs
from .wgmma import SIZES, rows_of

_HEAD, _KEYS, _TILE, _THREADS, _STAGES = 64, 80, 64, 128, 3  # as in those files
_KEY_BYTES, _TILE_BYTES = 2 * _KEYS * _HEAD, 2 * _TILE * _HEAD
_ALIGNMENT = 1024
_FORWARD_BYTES = _ALIGNMENT + 2 * _KEY_BYTES + _STAGES * _TILE_BYTES
_SHARED_BYTES = _ALIGNMENT + 2 * _KEY_BYTES + (2 * _STAGES + 2) * _TILE_BYTES + 2 * 2 * _TILE * _KEYS
_FORWARD_BLOCKS = 4  # blocks that a multiprocessor holds at once
_SHARES = (5, 4, 3, 2)  # blocks of a cluster
_MOST = 8  # blocks of a cluster that any card has room for, if with one a multiprocessor


def why_not(query: Array, key: Array, is_causal: bool, scale: float | None) -> str:
    """Says why the kernels do not replace cuDNN's; "" if they do."""
    keys = key.shape[-2]
    if query.shape[-1] != _HEAD or keys > _KEYS:
        return f"{keys} keys of size {query.shape[-1]}: expected at most {_KEYS} of {_HEAD}"
    if is_causal:
        return "no causal mask"
    return "" if int(query.device.compute_capability) == 90 else "its products are compute capability 9.0's alone"


def forward(k: Launcher, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float) -> None:
    """Fills `out` and the rows' log-sum-exp for (B, H, L, E) query and (B, H, S, E) key and value.

    Args:
        query: (B, H, L, E).
        key, value: (B, H, S, E).
    """
    (b, heads, length, _), keys = query.shape, key.shape[2]
    query, key, value = (in_packets(k, x) for x in (query, key, value))
    k.launch_hooks.multiplied("attention", forward_flops(query, key, value))
    of_head = max(1, min(-(-length // _TILE), _FORWARD_BLOCKS * k.multiprocessors // (b * heads)))
    k.launch_sm90(
        _forward_text(query.dtype),
        "short_kv_forward",
        query.dtype,
        (b * heads, of_head),
        _THREADS,
        (_rows(query), _keys(key), _keys(value), _rows(out), lse, _sizes(b, heads, length, keys, scale)),
        _FORWARD_BYTES,
    )


def gradients(k: Launcher, g: Array, inputs: Inputs, lse: Array, into: tuple[Array, Array, Array]) -> None:
    """Fills `into` with the gradients at (B, H, L, E) query and (B, H, S, E) key and value.

    Args:
        g: the gradient of the result, (B, H, L, E).
        inputs: what the forward pass got.
        into: memory for the gradients.
    """
    g, query, key, value = (in_packets(k, x) for x in (g, inputs.query, inputs.key, inputs.value))
    (b, heads, length, _), keys = query.shape, key.shape[2]
    dq, dk, dv = into
    k.launch_hooks.multiplied("attention", backward_flops(query, key, value))
    share = shares(b * heads, -(-length // _TILE), k.multiprocessors)
    k.launch_sm90(
        _gradients_text(g.dtype, share),
        "short_kv_gradients",
        g.dtype,
        (b * heads, share),
        _THREADS,
        (
            _rows(query),
            _keys(key),
            _keys(value),
            _rows(g),
            _rows(dq),
            lse,
            rows_of(dk),
            rows_of(dv),
            _sizes(b, heads, length, keys, inputs.factor),
        ),
        _SHARED_BYTES,
    )


def shares(heads: int, tiles: int, multiprocessors: int) -> int:
    """Returns how many blocks, a cluster, share a head."""
    if heads * _MOST <= multiprocessors and tiles >= _MOST:
        return _MOST
    return next((s for s in _SHARES if s <= tiles and heads * s <= SM_90.cluster_crowding * multiprocessors), 1)


def _rows(x: Array) -> np.ndarray[Any, Any]:
    return tensor_map(x, (_TILE, _HEAD))


def _keys(x: Array) -> np.ndarray[Any, Any]:
    return tensor_map(x, (_KEYS, _HEAD))


def _sizes(*sizes: float) -> np.ndarray[Any, Any]:
    return struct(sizes, SIZES)


@cache
def _forward_text(dtype: DType) -> str:
    return _products(dtype) + included('#include "ops/attention/short_kv_forward.cuh"\n')


@cache
def _gradients_text(dtype: DType, share: int) -> str:
    turned = warpgroup_product("turned", _KEYS, True, dtype, turned=True)
    header = included('#include "ops/attention/short_kv_gradients.cuh"\n')
    return f"#define SHARE {share}\n{turned}{_products(dtype)}{header}"


def _products(dtype: DType) -> str:
    return "".join(
        (
            warpgroup_product("along", _KEYS, False, dtype),
            warpgroup_product("along_overwrite", _KEYS, False, dtype, overwrite=True),
            warpgroup_product("across", _HEAD, True, dtype, held=True),
            warpgroup_product("across_overwrite", _HEAD, True, dtype, held=True, overwrite=True),
        )
    )
