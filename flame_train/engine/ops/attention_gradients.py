"""When attention_gradients.cuh is asked, and how: gradients of attention that are the same in every run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..backend.cuda.nvrtc import included
from ..backend.cuda.tensor_map import tensor_map
from ..backend.cuda.warpgroup import warpgroup_product
from ..dtype import Array, DType
from ..mode import mode

_HEAD, _TILE, _CONSUMERS, _STAGES = 64, 64, 2, 4  # as there
_ROWS, _TILE_BYTES = _TILE * _CONSUMERS, 2 * _TILE * _HEAD
_SHARED_BYTES = 1024 + 2 * (_CONSUMERS + _STAGES) * _TILE_BYTES + _STAGES * 2 * _TILE * 4
_PLACED = np.dtype([("at", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")])
_SIZES = np.dtype([("batches", "i4"), ("heads", "i4"), ("queries", "i4"), ("keys", "i4"), ("scale", "f4")])


def unfit(query: Array, key: Array, is_causal: bool) -> str:
    """Why the kernel is not asked for what cuDNN could do as well; empty when it is."""
    if query.shape[-1] != _HEAD or is_causal:
        return f"heads of {query.shape[-1]}{', a causal mask' * is_causal}: expected {_HEAD} and no mask"
    if int(query.device.compute_capability) != 90:
        return "its products are compute capability 9.0's alone"
    return "" if mode().deterministic else "cuDNN's sums in any order are as fast"


def gradients(
    k: Any, g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, into: tuple[Array, Array, Array],
    scale: float,
) -> None:  # fmt: skip
    """Fills `into` with the gradients at (B, H, L, 64) query and (B, H, S, 64) key and value; all lie in packets."""
    (b, heads, length, _), keys = query.shape, key.shape[2]
    tiles = -(-length // _TILE)
    factors = k.empty((b * heads, tiles, 2, _TILE), np.dtype(np.float32))
    numbers = map(np.int32, (b, heads, length))
    k.launch(
        "attention_factors.cu", "attention_factors", g.dtype, (-(-b * heads * tiles * _TILE // 32),), 256,
        (_placed(g), _placed(out), lse, factors, *numbers),
    )  # fmt: skip
    blocks = b * heads * (-(-keys // _ROWS) + -(-length // _ROWS))
    maps = (tensor_map(x, (_TILE, _HEAD)) for x in (query, key, value, g))
    sizes = np.array([(b, heads, length, keys, scale)], _SIZES)
    k.launch_here(
        _text(g.dtype), "attention_gradients", g.dtype, (blocks,), 128 * (_CONSUMERS + 1),
        (*maps, factors, *map(_placed, into), sizes), _SHARED_BYTES,
    )  # fmt: skip


@cache
def _text(dtype: DType) -> str:
    products = (
        warpgroup_product("along", _TILE, False, dtype, held=True),
        warpgroup_product("along_fresh", _TILE, False, dtype, held=True, fresh=True),
        warpgroup_product("across", _TILE, True, dtype, held=True),
    )
    return "".join(products) + included('#include "attention_gradients.cuh"\n')


def _placed(x: Array) -> np.ndarray[Any, Any]:
    return np.array([(x.data.ptr, *(s // x.itemsize for s in x.strides[:3]))], _PLACED)
