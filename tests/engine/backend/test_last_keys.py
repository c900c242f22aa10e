"""Attention to keys that fill no tile of cuDNN's: what cuDNN is given, what our own kernel, and that it is all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.mode import deterministic
from flame_train.engine.ops import attention_few_keys

BF16 = np.dtype(ml_dtypes.bfloat16)
Call = dict[str, Any]


@pytest.fixture
def calls(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Who was asked for what, in order."""
    made = list[Call]()

    def forward(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, causal: bool) -> None:
        made.append({"k": k, "v": v, "out": out, "lse": lse})

    def backward(*given: Any, causal: bool = False) -> None:
        names = ("q", "k", "v", "out", "lse", "g", "dq", "dk", "dv")
        made.append(dict(zip(names, given, strict=False)))

    def rest(_: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, last: bool = False) -> None:
        made.append({"k": k, "v": v, "out": out, "lse": lse, "last": last})

    def rest_back(_: Any, g: Any, q: Any, k: Any, v: Any, lse: Any, into: Any, scale: float, out: Any = None) -> None:
        made.append({"k": k, "v": v, "out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), into, strict=True))})

    cudnn = SimpleNamespace(attention_forward=forward, attention_backward=backward)
    monkeypatch.setattr(gpu.kernels, "cudnn", cudnn)
    monkeypatch.setattr(attention_few_keys, "forward", rest)
    monkeypatch.setattr(attention_few_keys, "gradients", rest_back)
    return made


def attend(keys: int, head: int = 64) -> None:
    q, k, v, g = (
        flame.tensor(np.zeros((1, 2, n, head), BF16), device="cuda", requires_grad=True) for n in (3, keys, keys, 3)
    )
    flame.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), g.detach())


def follows(first: Any, rest: Any) -> bool:
    """Whether `rest` begins where `first` ends, in rows of one array."""
    return bool(rest.data.ptr - first.data.ptr == first.shape[2] * first.strides[2] and first.strides == rest.strides)


def test_each_key_is_attended_to_once(calls: list[Call]) -> None:
    with deterministic(False):
        attend(2048 + 77)
    found, more, back, rest = calls
    assert [c["k"].shape[2] for c in calls] == [2048, 77, 2048, 77]
    for first, last in ((found, more), (back, rest)):
        assert all(follows(first[name], last[name]) for name in ("k", "v"))
        assert first["out"] is last["out"]
        assert first["lse"] is last["lse"]
    assert more["last"]
    assert all(follows(back[name], rest[name]) for name in ("dk", "dv"))
    assert back["dq"] is rest["dq"]
    assert back["out"] is found["out"]
    starts = [[c[name].data.ptr for name in ("k", "v")] for c in calls]
    assert starts[:2] == starts[2:], "the gradients' keys and values are those that were attended to"
    assert all(k != v for k, v in starts)


@pytest.mark.parametrize(
    ("keys", "exact", "asked"),
    [
        (2048, False, [2048, 2048]),  # whole tiles
        (2048 + 81, False, [2129, 2129]),  # more than the kernel has room for
        (1024 + 77, False, [1101, 1101]),  # too few to be worth another pass
        (2048 + 64, False, [2048, 64, 2112]),  # cuDNN's gradients mask by 64
        (2048 + 77, True, [2048, 77, 2125]),  # and gain nothing where they add in a fixed order
    ],
)
def test_where_it_gains_nothing_cudnn_has_all_keys(calls: list[Call], keys: int, exact: bool, asked: list[int]) -> None:
    with deterministic(exact):
        attend(keys)
    assert [c["k"].shape[2] for c in calls] == asked


def test_other_head_sizes_go_to_cudnn(calls: list[Call]) -> None:
    with deterministic(False):
        attend(2048 + 77, 128)
    assert [c["k"].shape[2] for c in calls] == [2125, 2125]
