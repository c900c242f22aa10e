"""Bases stored in 8 bits on a GPU: gradients of the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.tools import bench
from flame_train.training.step import micro

pytestmark = pytest.mark.gpu

MODELS = ["sdxl-tiny", "sd3-tiny", "flux-tiny"]


def gradients(model: str, device: str, arithmetic: Any, precision: Any = "fp32") -> np.ndarray:
    """All adapters' gradients of a first step, which randomly drawn weights and batches make alike everywhere."""
    stored = {"quantize": "fp8", "arithmetic": arithmetic}
    p = bench.prepare(bench.BenchCase(model, 128, batch=2, rank=16, precision=precision, device=device, **stored))
    micro(p.state, p.batch)
    return p.backend.to_host(p.state.optimizer.arena.grads).astype(np.float64)


@pytest.mark.parametrize("model", MODELS)
def test_stored_weights_give_the_gradients_of_the_cpu(model: str) -> None:
    truth, got = (gradients(model, device, "bf16") for device in ("cpu", "cuda"))
    assert np.linalg.norm(got - truth) < 1e-4 * np.linalg.norm(truth)


@pytest.mark.parametrize("model", MODELS)
def test_products_of_8_bits_give_the_gradients_of_the_cpu_but_for_rounding(model: str) -> None:
    """Rows differ in the last bit of bf16 before they are rounded to 8, so some fall to the other side."""
    exact = gradients(model, "cpu", "bf16")
    truth, got = (gradients(model, device, "fp8", "bf16") for device in ("cpu", "cuda"))
    assert np.linalg.norm(got - exact) < 1.5 * np.linalg.norm(truth - exact)
    assert got @ exact > 0.95 * np.linalg.norm(got) * np.linalg.norm(exact)
