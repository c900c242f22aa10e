"""Gradients of attention in fp32 by matrix products, run as C++ and NumPy: parts of heads, and of their queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dispatch import explain_gradients
from flame_train.engine.ops.attention import kernels as by_products
from flame_train.engine.ops.attention.operands import Inputs

ATTENTION = F.scaled_dot_product_attention
SCALE = 0.3
SHAPES = [(2, 3, 150, 72, 32, 32), (1, 2, 300, 64, 40, 24), (2, 1, 130, 128, 16, 64)]


@pytest.fixture(params=[1 << 30, 128 * 4 * 150, 1], ids=["all at once", "some heads", "some queries"])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_products, "_SCORES_BYTES", request.param)
    monkeypatch.setattr(by_products, "_LEAST", 1)


def drawn(shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    b, h, queries, keys, head, values = shape
    rng = np.random.default_rng(5)
    sizes = ((queries, h, head), (keys, h, head), (keys, h, values), (queries, h, values))
    return [rng.standard_normal((b, *size)).astype(np.float32) for size in sizes]


def in_numpy(arrays: list[np.ndarray[Any, Any]], dtype: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """The output, its log-sum-exps, and the gradients of query, key and value, from the formulas."""
    q, k, v, g = (a.astype(dtype).swapaxes(1, 2) for a in arrays)
    scores = q @ k.swapaxes(2, 3) * dtype(SCALE)
    top = scores.max(axis=-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    p = np.exp(scores - lse)
    out = p @ v
    slopes = p * (g @ v.swapaxes(2, 3) - (g * out).sum(axis=-1, keepdims=True)) * dtype(SCALE)
    return out, lse, slopes @ k, slopes.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ g


@pytest.mark.slow
@pytest.mark.usefixtures("compiler", "small_parts")
def test_gradients(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads lie as a linear layer's columns."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)

    def placed(a: np.ndarray[Any, Any]) -> Any:
        return flame.tensor(a, device="cuda").data

    def found(arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        out, lse, *_ = in_numpy(arrays, np.float32)
        q, k, v, g = (placed(a).transpose(0, 2, 1, 3) for a in arrays)
        inputs = Inputs(q, k, v, None, False, SCALE, False, None)
        assert by_products.why_not(inputs, 0.0) == ""
        needs = frozenset(("query", "key", "value"))
        made = by_products.gradients(gpu.kernels, g, inputs, placed(out), placed(lse), needs)
        return [np.asarray(a.get(), np.float64) for a in made if a is not None]

    cases = [drawn(shape) for shape in SHAPES]
    for arrays in cases:
        found(arrays)
    compiled.build()
    for arrays in cases:
        (_, _, *plain), (_, _, *truth) = in_numpy(arrays, np.float32), in_numpy(arrays, np.float64)
        for got, near, exact in zip(found(arrays), plain, truth, strict=True):
            scale = np.linalg.norm(exact)
            assert np.linalg.norm(got - exact) / scale <= 2 * np.linalg.norm(near - exact) / scale + 1.2e-7


def test_parts_cover_each_query_of_each_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 5000, 400 << 10, 1 << 30):
        monkeypatch.setattr(by_products, "_SCORES_BYTES", limit)
        seen = np.zeros((5, 300), int)
        for heads, rows in by_products._parts(np.empty((5, 300, 8), np.float32), np.empty((5, 90, 8), np.float32)):
            seen[heads, rows] += 1
            size = (heads.stop - heads.start) * (rows.stop - rows.start)
            assert size * 90 * 4 <= limit or size <= 128
        assert (seen == 1).all()


def test_long_sequences_of_fp32_alone_have_such_gradients(gpu: Any) -> None:
    def chosen(queries: int, keys: int, dtype: Any = np.float32, **more: Any) -> str:
        q, k = (flame.tensor(np.zeros((1, 2, n, 64), dtype), device="cuda").requires_grad_() for n in (queries, keys))
        found = explain_gradients(ATTENTION, q, k, k, **more)["query"]
        return next(name for name, why in found if why == "chosen")

    assert chosen(1024, 1024) == "products"
    others = chosen(512, 1024), chosen(1024, 1025), chosen(1024, 1024, is_causal=True), chosen(1024, 1024, np.float16)
    assert "products" not in others
