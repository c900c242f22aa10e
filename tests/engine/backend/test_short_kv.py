"""Attention to a caption's keys: who is asked, how a head is shared, what the kernels are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda import hopper as tensor_map
from flame_train.engine.dtype import bfloat16
from flame_train.engine.ops.attention import short_kv
from flame_train.engine.ops.attention.short_kv import shares
from flame_train.engine.ops.attention.wgmma import SIZES

MULTIPROCESSOR_BYTES, OF_A_BLOCK = 228 << 10, 1 << 10  # shared memory, and what of it is the system's


def attend(batch: int, heads: int, length: int, keys: int, **more: Any) -> None:
    q, k, v, g = (
        flame.tensor(np.zeros((batch, n, heads, 64), bfloat16), device="cuda", requires_grad=True).transpose(1, 2)
        for n in (length, keys, keys, length)
    )
    flame.grad(F.scaled_dot_product_attention(q, k, v, **more), (q, k, v), g.detach())


def test_what_the_kernels_are_told(launched: Any) -> None:
    attend(4, 20, 1000, 77, scale=0.5)
    queries, keys = ((4, 20, 1000, 64), (64, 64)), ((4, 20, 77, 64), (80, 64))
    (heads, of_head), threads, args, shared = launched.by_name["short_kv_forward"]
    assert (heads, threads) == (80, 128)
    assert 80 * of_head <= 4 * 132
    assert args[:4] == (queries, keys, keys, queries)
    assert args[-1].view(SIZES).item() == (4, 20, 1000, 77, 0.5)
    assert 4 * (shared + OF_A_BLOCK) <= MULTIPROCESSOR_BYTES
    grid, threads, args, shared = launched.by_name["short_kv_gradients"]
    assert (grid, threads) == ((80, 2), 128)
    assert args[:5] == (queries, keys, keys, queries, queries)
    assert launched.texts["short_kv_gradients"].startswith("#define SHARE 2\n")
    assert 2 * (shared + OF_A_BLOCK) <= MULTIPROCESSOR_BYTES


@pytest.mark.parametrize("capability", ["89", "100"])
def test_other_cards_have_no_such_products(launched: Any, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = flame.tensor(np.zeros((1, 1), bfloat16), device="cuda")
    monkeypatch.setattr(type(q.data).device, "compute_capability", capability)
    query, key = (np.zeros((1, 1, n, 64), bfloat16).view(type(q.data)) for n in (100, 77))
    assert "9.0's alone" in short_kv.why_not(query, key, False, None)


def test_as_many_blocks_share_a_head_as_was_fastest_on_an_h200() -> None:
    measured = {(10, 64): 8, (20, 64): 5, (40, 64): 5, (40, 16): 5, (80, 16): 2, (160, 16): 1}
    assert {case: shares(*case, 132) for case in measured} == measured


def test_every_block_has_queries() -> None:
    assert all(1 <= shares(heads, tiles, 132) <= tiles for heads in range(1, 200) for tiles in range(1, 12))


def test_the_kernels_structs_are_what_is_passed(same_layout: Any) -> None:
    text = short_kv._gradients_text(bfloat16, 2)
    same_layout(text, {"Sizes": SIZES, "TensorMap": tensor_map.STRUCT})
