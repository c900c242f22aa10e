"""Attention by warpgroups: who is asked for what, and what the kernels are told; what they compute is for tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda import tensor_map
from flame_train.engine.dtype import bfloat16
from flame_train.engine.mode import deterministic
from flame_train.engine.ops.attention import wgmma

Shape = tuple[int, int, int, int]


@pytest.fixture
def calls(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was asked, in order."""
    made = list[str]()
    cudnn = SimpleNamespace(
        attention_forward=lambda *_: made.append("cudnn"), attention_backward=lambda *_: made.append("cudnn")
    )
    monkeypatch.setattr(gpu.kernels, "cudnn", cudnn)
    for name in ("forward", "gradients"):
        monkeypatch.setattr(wgmma, name, lambda *_: made.append("wgmma"))
    return made


def attend(shape: Shape, keys: int, **more: Any) -> None:
    b, h, length, e = shape
    q, k, v, g = (
        flame.tensor(np.zeros((b, h, n, e), bfloat16), device="cuda", requires_grad=True)
        for n in (length, keys, keys, length)
    )
    flame.grad(F.scaled_dot_product_attention(q, k, v, **more), (q, k, v), g.detach())


@pytest.mark.parametrize(
    ("shape", "keys", "exact", "asked"),
    [
        ((1, 20, 1024, 64), 1024, True, ["wgmma", "wgmma"]),
        ((1, 20, 1024, 64), 1024, False, ["wgmma", "wgmma"]),
        ((1, 38, 429, 64), 4429, False, ["wgmma", "wgmma"]),
        ((4, 20, 1024, 64), 1024, True, ["cudnn", "wgmma"]),  # 81 % of the forward kernel's tiles, 97 of cuDNN's
        ((4, 20, 1024, 64), 1000, True, ["wgmma", "wgmma"]),  # whose last tile of keys is not full
        ((4, 10, 4096, 64), 4096, True, ["wgmma", "wgmma"]),
        ((4, 10, 4096, 64), 4096, False, ["wgmma", "cudnn"]),  # five products for seven
        ((4, 10, 4096, 64), 4000, False, ["wgmma", "wgmma"]),
        ((1, 20, 1024, 128), 1024, True, ["cudnn", "cudnn"]),
    ],
)
def test_who_is_asked(calls: list[str], shape: Shape, keys: int, exact: bool, asked: list[str]) -> None:
    with deterministic(exact):
        attend(shape, keys)
    assert calls == asked


def test_what_the_kernels_do_not_do_is_left_to_cudnn(calls: list[str]) -> None:
    attend((1, 20, 1024, 64), 1024, is_causal=True)
    assert calls == ["cudnn", "wgmma"]
    calls.clear()
    attend((1, 20, 1024, 64), 1024, attn_mask=flame.tensor(np.ones((1024, 1024), bool), device="cuda"))
    assert calls == ["cudnn", "cudnn"]
    calls.clear()
    attend((1, 20, 1024, 64), 1024, scale=-1.0)
    assert calls == ["cudnn", "wgmma"]


@pytest.mark.parametrize("capability", ["89", "100"])
def test_other_cards_have_no_such_products(calls: list[str], capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = flame.tensor(np.zeros((1, 1), bfloat16), device="cuda")
    monkeypatch.setattr(type(q.data).device, "compute_capability", capability)
    attend((1, 20, 1024, 64), 1024)
    assert calls == ["cudnn", "cudnn"]


def test_what_the_kernels_are_told(launched: Any) -> None:
    attend((1, 20, 1024, 64), 1000, scale=0.5)
    grid, threads, args, shared = launched.by_name["attention_forward"]
    assert (grid, threads) == ((20 * 6,), 512)  # 192 queries an item
    assert args[:3] == (((1, 20, 1024, 64), (64, 64)), *[((1, 20, 1000, 64), (64, 64))] * 2)
    assert args[-1][0].item() == (1, 20, 1024, 1000, 0.5)
    assert shared <= 227 << 10
    grid, threads, args, shared = launched.by_name["attention_gradients"]
    assert (grid, threads) == ((132,), 384)  # of 320 items each block takes some
    factors = args[4]
    assert factors.shape == (20, 16, 2, 64)
    assert shared <= 227 << 10
    ((blocks,), threads, _, _) = launched.by_name["attention_factors"]
    assert blocks * threads >= 20 * 1024 * 8


def test_a_causal_mask_is_compiled_in(launched: Any) -> None:
    attend((1, 20, 1024, 64), 1000, is_causal=True)
    assert "CAUSAL = true" in launched.texts["attention_gradients"]
    attend((1, 20, 1024, 64), 1000)
    assert "CAUSAL = false" in launched.texts["attention_gradients"]


@pytest.mark.parametrize("name", ["forward", "gradients"])
def test_the_kernels_structs_are_what_is_passed(name: str, same_layout: Any) -> None:
    text = wgmma._forward_text(bfloat16) if name == "forward" else wgmma._gradients_text(bfloat16, False)
    structs = {"Sizes": wgmma.SIZES, "Rows": wgmma._PLACED}
    same_layout(text, structs | {"TensorMap": tensor_map.STRUCT})


def test_a_description_names_every_dim_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver wants them: sizes from the dense dim on, distances without its own, a tile of ones but for two."""
    told = list[tuple[Any, ...]]()
    monkeypatch.setattr(tensor_map, "_encode", lambda: lambda *given: told.append(given) or 0)
    x = SimpleNamespace(
        data=SimpleNamespace(ptr=1 << 20), dtype=bfloat16, shape=(2, 3, 100, 64), strides=(1 << 16, 128, 384, 2)
    )
    tensor_map.tensor_map(x, (64, 64))
    _, _, rank, pointer, sizes, strides, box, every, *_ = told[0]
    assert (rank, pointer) == (4, 1 << 20)
    assert [list(a) for a in (sizes, strides, box, every)] == [
        [64, 100, 3, 2],
        [384, 128, 1 << 16],
        [64, 64, 1, 1],
        [1] * 4,
    ]
