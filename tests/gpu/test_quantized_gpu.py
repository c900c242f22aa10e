"""Bases stored in fewer bits on a GPU: gradients of the CPU's, and int8 products that are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.tools import bench
from flame_train.training.step import micro

pytestmark = pytest.mark.gpu

MODELS = ["sdxl-tiny", "sd3-tiny", "flux-tiny"]


def gradients(model: str, device: str, quantize: Any, arithmetic: Any, precision: Any = "fp32") -> np.ndarray:
    """All adapters' gradients of a first step, which randomly drawn weights and batches make alike everywhere."""
    stored = {"quantize": quantize, "arithmetic": arithmetic}
    p = bench.prepare(bench.BenchCase(model, 128, batch=2, rank=16, precision=precision, device=device, **stored))
    micro(p.state, p.batch)
    return p.backend.to_host(p.state.optimizer.arena.grads).astype(np.float64)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("quantize", ["fp8", "int8", "nf4"])
def test_stored_weights_give_the_gradients_of_the_cpu(model: str, quantize: str) -> None:
    truth, got = (gradients(model, device, quantize, "bf16") for device in ("cpu", "cuda"))
    assert np.linalg.norm(got - truth) < 1e-4 * np.linalg.norm(truth)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stored", ["fp8", "int8"])
def test_products_of_8_bits_give_the_gradients_of_the_cpu_but_for_rounding(model: str, stored: str) -> None:
    """Rows differ in the last bit of bf16 before they are rounded to 8, so some fall to the other side."""
    exact = gradients(model, "cpu", stored, "bf16")
    truth, got = (gradients(model, device, stored, stored, "bf16") for device in ("cpu", "cuda"))
    assert np.linalg.norm(got - exact) < 1.5 * np.linalg.norm(truth - exact)
    assert got @ exact > 0.95 * np.linalg.norm(got) * np.linalg.norm(exact)


@pytest.mark.parametrize(("rows", "out", "width"), [(4608, 3072, 3072), (77, 640, 2048), (1000, 12288, 3072)])
def test_products_of_int8_are_exact(rows: int, out: int, width: int) -> None:
    """Before the factors are applied: so fp32 results have the bits of whole sums that are made on the host."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 128, (n, width)).astype(np.int8) for n in (rows, out))
    k, one = get_backend("cuda").kernels, np.float32(1).view(np.uint32)
    on = [flame.tensor(a, device="cuda").data for a in (x, np.full(rows, one), w, np.full(out, one))]
    made = k.empty((rows, out), np.dtype(np.float32))
    k.scaled_product((on[0], on[1]), (on[2], on[3]), out=made)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_array_equal(get_backend("cuda").to_host(made), want.astype(np.float32))


def test_4_bits_have_the_bits_of_the_cpu() -> None:
    weight = np.random.default_rng(1).standard_normal((3072, 1024)).astype(np.float32)
    for dtype in ("float32", "bfloat16"):
        found = []
        for device in ("cpu", "cuda"):
            parts = F.nf4_quantize(flame.tensor(weight, device=device))
            back = F.nf4_dequantize(*parts, weight.shape, dtype)
            found.append([part.numpy() for part in (*parts, back)])
        for want, got in zip(*found, strict=True):
            np.testing.assert_array_equal(got, want)
