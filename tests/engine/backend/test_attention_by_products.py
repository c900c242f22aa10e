"""Attention in fp32 by matrix products, run as C++ and NumPy without a GPU: parts of heads, and of their queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dispatch import explain, explain_gradients
from flame_train.engine.ops.attention import by_products

ATTENTION = F.scaled_dot_product_attention
SHAPES = [(2, 3, 150, 70, 32, 32), (1, 2, 300, 64, 40, 24), (2, 1, 130, 129, 16, 64)]


@pytest.fixture(params=[1 << 30, 128 * 4 * 150, 1], ids=["all at once", "some heads", "some queries"])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_products, "_SCORES_BYTES", request.param)
    monkeypatch.setattr(by_products, "_LEAST", 1)


def drawn(shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    b, h, queries, keys, head, values = shape
    rng = np.random.default_rng(5)
    sizes = ((queries, h, head), (keys, h, head), (keys, h, values), (queries, h, values))
    return [rng.standard_normal((b, *size)).astype(np.float32) for size in sizes]


def results(arrays: list[np.ndarray[Any, Any]], device: str, dtype: Any) -> list[np.ndarray[Any, Any]]:
    """The output and three gradients; heads lie as a linear layer's columns, and gradients arrive twice."""
    *leaves, g = (flame.tensor(a.astype(dtype), device=device) for a in arrays)
    leaves = [x.requires_grad_() for x in leaves]
    made = [ATTENTION(*(x.transpose(1, 2) for x in leaves), scale=0.3) for _ in range(2)]
    grads = flame.grad(made, leaves, [g.transpose(1, 2)] * 2)
    return [np.asarray(x.numpy(), np.float64) for x in (made[0], *grads)]


@pytest.mark.slow
@pytest.mark.usefixtures("compiler", "small_parts")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(
    gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    arrays = drawn(shape)
    results(arrays, "cuda", np.float32)
    compiled.build()
    got, plain, truth = (
        results(arrays, *where) for where in (("cuda", np.float32), ("cpu", np.float32), ("cpu", np.float64))
    )
    for g, p, t in zip(got, plain, truth, strict=True):
        scale = np.linalg.norm(t)
        assert np.linalg.norm(g - t) / scale <= 2 * np.linalg.norm(p - t) / scale + 1.2e-7


def test_parts_cover_each_query_of_each_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 5000, 400 << 10, 1 << 30):
        monkeypatch.setattr(by_products, "_SCORES_BYTES", limit)
        seen = np.zeros((5, 300), int)
        for heads, rows in by_products._parts(np.empty((5, 300, 8), np.float32), np.empty((5, 90, 8), np.float32)):
            seen[heads, rows] += 1
            size = (heads.stop - heads.start) * (rows.stop - rows.start)
            assert size * 90 * 4 <= limit or size <= 128
        assert (seen == 1).all()


def test_long_sequences_of_fp32_alone_are_made_so(gpu: Any) -> None:
    def chosen(queries: int, dtype: Any = np.float32, **more: Any) -> tuple[str, str]:
        x = flame.tensor(np.zeros((1, 2, queries, 64), dtype), device="cuda").requires_grad_()
        found = (explain(ATTENTION, x, x, x, **more), explain_gradients(ATTENTION, x, x, x, **more)["query"])
        forward, backward = (next(name for name, why in each if why == "chosen") for each in found)
        return forward, backward

    assert chosen(1024) == ("products", "products")
    assert "products" not in (*chosen(512), *chosen(1024, is_causal=True))
