"""Attention by warpgroups: who is asked for what, and what the kernels are told; what they compute is for tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda import hopper as tensor_map
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


KEYS = (4, 1, 1, 4096)


@pytest.mark.parametrize(
    ("shape", "mask", "dtype", "exact", "asked"),
    [
        ((4, 10, 4096, 64), KEYS, bool, True, "wgmma"),
        ((4, 10, 4096, 64), (4096,), bool, True, "wgmma"),
        ((4, 10, 4096, 64), (1, 4096), bool, True, "wgmma"),
        ((4, 10, 4096, 64), KEYS, bool, False, "cudnn"),
        ((4, 10, 4096, 64), KEYS, bfloat16, True, "cudnn"),  # numbers to add
        ((4, 10, 4096, 64), (4, 10, 1, 4096), bool, True, "cudnn"),
        ((4, 10, 4096, 64), (4, 1, 4096, 1), bool, True, "cudnn"),
        ((4, 20, 1024, 64), (4, 1, 1, 77), bool, True, "cudnn"),
        ((1, 20, 1024, 128), (1024,), bool, True, "cudnn"),
    ],
)
def test_who_is_asked_where_keys_are_barred(
    calls: list[str], shape: Shape, mask: tuple[int, ...], dtype: Any, exact: bool, asked: str
) -> None:
    """Gradients alone: forward it is cuDNN."""
    bars = flame.tensor(np.ones(mask, dtype), device="cuda")
    with deterministic(exact):
        attend(shape, mask[-1] if mask[-1] > 1 else 4096, attn_mask=bars)
    assert (calls[0], {*calls[1:]}) == ("cudnn", {asked})


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "rows"), [((2, 1, 1, 70), 2), ((70,), 1), ((1, 70), 1), ((2, 1, 1, 1), 2)])
def test_what_bars_a_key(
    gpu: Any, compiled: Any, mask: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of whole tiles."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    seen = np.random.default_rng(0).random(mask) < 0.5
    given = flame.tensor(seen, device="cuda").data
    wgmma._bars(gpu.kernels, given, 70)
    compiled.build()
    found = wgmma._bars(gpu.kernels, given, 70).get()
    assert found.shape == (rows, 128)
    want = np.broadcast_to(np.where(seen, 0.0, -np.inf).reshape(rows, -1), (rows, 70))
    np.testing.assert_array_equal(found[:, :70], want)


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
    assert args[-1].view(wgmma.SIZES).item() == (1, 20, 1024, 1000, 0.5)
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
    assert "CAUSAL = false, MASKED = false" in launched.texts["attention_gradients"]


def test_barred_keys_are_compiled_in(launched: Any) -> None:
    mask = flame.tensor(np.ones((2, 1, 1, 1000), bool), device="cuda")
    attend((2, 20, 1024, 64), 1000, attn_mask=mask)
    assert "MASKED = true" in launched.texts["attention_gradients"]
    bars, apart = launched.by_name["attention_gradients"][2][5:7]
    assert (bars.shape, apart) == ((2, 1024), 1024)
    attend((2, 20, 1024, 64), 1000, attn_mask=mask[:1])
    bars, apart = launched.by_name["attention_gradients"][2][5:7]
    assert (bars.shape, apart) == ((1, 1024), 0)


@pytest.mark.parametrize("name", ["forward", "gradients"])
def test_the_kernels_structs_are_what_is_passed(name: str, same_layout: Any) -> None:
    text = wgmma._forward_text(bfloat16) if name == "forward" else wgmma._gradients_text(bfloat16, False, False)
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
