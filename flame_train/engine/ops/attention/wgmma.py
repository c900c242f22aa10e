"""When wgmma_forward.cuh and wgmma_gradients.cuh are used, and how they are launched."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...backend import current_gpu
from ...backend.cuda.hopper import tensor_map, warpgroup_product
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.nvrtc import included, struct
from ...backend.cuda.tuning import SM_90
from ...dtype import Array, DType, bool_
from ...mode import mode
from . import masks
from .memory_layout import backward_flops, forward_flops, in_packets, query_factors
from .operands import Inputs, Saved

_HEAD, _TILE = 64, 64  # as in those files
_TILE_BYTES = 2 * _TILE * _HEAD
_GROUPS, _FORWARD_GROUPS, _WIDE = 2, 3, 2
_ROWS, _FORWARD_ROWS = _TILE * _GROUPS, _TILE * _FORWARD_GROUPS
_STAGES, _OWNS = 4, 2
_ALIGNMENT = 1024
_SHARED_BYTES = _ALIGNMENT + 2 * (_GROUPS + _STAGES) * _TILE_BYTES + _STAGES * 2 * _TILE * 4
_FORWARD_BYTES = _ALIGNMENT + (_OWNS * _FORWARD_GROUPS + 2 * _WIDE * _STAGES) * _TILE_BYTES
_WHOLE = 128  # rows of cuDNN's tiles, of queries and of keys
_MANY_KEYS = 512  # fewer masked ones, such as a caption's, are cuDNN's: its pass over them was measured to be fast
_PLACED = np.dtype([("at", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
SIZES = np.dtype([("batches", "i4"), ("heads", "i4"), ("queries", "i4"), ("keys", "i4"), ("scale", "f4")])


def why_not_forward(query: Array, key: Array, is_causal: bool, scale: float | None) -> str:
    """Says why the forward kernel does not replace cuDNN's; "" if it does."""
    if scale is not None and scale <= 0:
        return f"a scale of {scale}: expected one above 0, which keeps the largest score the largest"
    if is_causal:
        return "cuDNN passes over what a causal mask bars"
    if reason := _why_not(query):
        return reason
    (b, heads, length, _), keys, blocks = query.shape, key.shape[-2], current_gpu().kernels.multiprocessors
    ours, theirs = (_used(b * heads, length, rows, blocks) for rows in (_FORWARD_ROWS, _WHOLE))
    if ours * (SM_90.cudnn_forward if keys % _WHOLE == 0 else SM_90.cudnn_forward_partial) < theirs:
        return f"{length} queries of {b * heads} heads fill cuDNN's tiles better: {ours:.0%} of ours are used"
    return ""


def why_not_gradients(query: Array, key: Array, attn_mask: Array | None) -> str:
    """Says why the gradient kernel does not replace cuDNN's; "" if it does: for determinism, wherever it can."""
    if reason := _why_not(query) or _why_not_mask(key, attn_mask):
        return reason
    rows = query.shape[0] * query.shape[1] * query.shape[-2]
    many = rows >= SM_90.cudnn_backward_rows
    if not mode().deterministic and many and min(query.shape[-2], key.shape[-2]) >= SM_90.cudnn_backward_length:
        return "" if key.shape[-2] % _TILE else f"{rows} queries: cuDNN's sums in any order are faster"
    return ""


def _why_not_mask(key: Array, attn_mask: Array | None) -> str:
    """Only masks of truth values that bar keys of a sample from all of its queries, and only for the same bits."""
    if attn_mask is None:
        return ""
    if attn_mask.dtype != bool_ or any(n != 1 for n in attn_mask.shape[-3:-1]):
        return "a mask that is not one of truth values of keys, (B or 1, 1, 1, S)"
    if not mode().deterministic:
        return "a mask: cuDNN's sums in any order are faster"
    keys = key.shape[-2]
    return f"{keys} masked keys: cuDNN does as well below {_MANY_KEYS}" if keys < _MANY_KEYS else ""


def _why_not(query: Array) -> str:
    if query.shape[-1] != _HEAD:
        return f"heads of {query.shape[-1]}: expected {_HEAD}"
    return "" if int(query.device.compute_capability) == 90 else "its products are compute capability 9.0's alone"


def _used(heads: int, length: int, rows: int, blocks: int) -> float:
    """Returns the share of all rounds' rows that hold queries, with `rows` rows of a head to a block."""
    rounds = -(-heads * -(-length // rows) // blocks)
    return heads * length / (rounds * blocks * rows)


def forward(k: Launcher, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float) -> None:
    """Fills `out` and the rows' log-sum-exp for (B, H, L, 64) query and (B, H, S, 64) key and value.

    All but the log-sum-exp must lie in packets, see `layout.lies_in_packets`.

    Args:
        query: (B, H, L, 64).
        key, value: (B, H, S, 64).
    """
    (b, heads, length, _), keys = query.shape, key.shape[2]
    k.launch_hooks.multiplied("attention", forward_flops(query, key, value))
    items = b * heads * -(-length // _FORWARD_ROWS)
    _launch(
        k,
        "attention_forward",
        _forward_text(query.dtype),
        items,
        _FORWARD_GROUPS,
        (query, key, value),
        (rows_of(out), lse),
        (b, heads, length, keys, scale),
        _FORWARD_BYTES,
    )


def gradients(k: Launcher, g: Array, inputs: Inputs, saved: Saved, into: tuple[Array, Array, Array]) -> None:
    """Fills `into` with the gradients of (B, H, L, 64) query and (B, H, S, 64) key and value.

    Args:
        g: the gradient of the result, (B, H, L, 64).
        inputs, saved: what the forward pass got and left.
        into: memory for the gradients, which lies in packets, see `layout.lies_in_packets`.
    """
    query, key, value, out, g = (in_packets(k, x) for x in (inputs.query, inputs.key, inputs.value, saved.out, g))
    (b, heads, length, _), keys = query.shape, key.shape[2]
    factors = query_factors(k, g, out, saved.lse)
    k.launch_hooks.multiplied("attention", backward_flops(query, key, value))
    masked = inputs.attn_mask is not None
    bars = _bars(k, inputs.attn_mask, keys) if inputs.attn_mask is not None else factors  # which is not read as such
    apart = bars.shape[-1] if masked and len(bars) > 1 else 0
    items = b * heads * (-(-keys // _ROWS) + -(-length // _ROWS))
    _launch(
        k,
        "attention_gradients",
        _gradients_text(g.dtype, inputs.is_causal, masked),
        items,
        _GROUPS,
        (query, key, value, g),
        (factors, bars, np.int64(apart), *map(rows_of, into)),
        (b, heads, length, keys, inputs.factor),
        _SHARED_BYTES,
    )


def _bars(k: Launcher, mask: Array, keys: int) -> Array:
    """Returns what is added to keys' scores, fp32 (B or 1, S up to whole tiles): 0, or minus infinity."""
    mask = mask.reshape(-1, mask.shape[-1])
    bars = k.empty((len(mask), -(-keys // _TILE) * _TILE), np.dtype(np.float32))
    whole = k.xp.broadcast_to(mask, (len(mask), keys))
    value = f"mask != 0.f ? 0.f : {masks.MINUS_INFINITY}"
    k.elementwise((value,), {"mask": whole}, (bars.dtype,), out=(bars[:, :keys],))
    return bars


def _launch(
    k: Launcher,
    kernel: str,
    text: str,
    items: int,
    groups: int,
    fetched: tuple[Array, ...],
    args: tuple[Any, ...],
    sizes: tuple[float, ...],
    shared_bytes: int,
) -> None:
    maps = (tensor_map(x, (_TILE, _HEAD)) for x in fetched)
    k.launch_sm90(
        text,
        kernel,
        fetched[0].dtype,
        (min(items, k.multiprocessors),),
        128 * (groups + 1),
        (*maps, *args, struct(sizes, SIZES)),
        shared_bytes,
    )


@cache
def _forward_text(dtype: DType) -> str:
    return _text("ops/attention/wgmma_forward.cuh", dtype, _TILE * _WIDE, held=False)


@cache
def _gradients_text(dtype: DType, causal: bool, masked: bool) -> str:
    kind = f"constexpr bool CAUSAL = {str(causal).lower()}, MASKED = {str(masked).lower()};\n"
    return kind + _text("ops/attention/wgmma_gradients.cuh", dtype, _TILE, held=True)


def _text(header: str, dtype: DType, columns: int, held: bool) -> str:
    products = (
        warpgroup_product("along", columns, False, dtype, held),
        warpgroup_product("along_overwrite", columns, False, dtype, held, overwrite=True),
        warpgroup_product("across", _HEAD, True, dtype, held=True),
    )
    return "".join(products) + included(f'#include "{header}"\n')


def rows_of(x: Array) -> np.ndarray[Any, Any]:
    """Returns where the rows of `x` (B, H, L, 64) lie, as kernels take it by value."""
    return struct((x.data.ptr, *(s // x.itemsize for s in x.strides[:3])), _PLACED)
