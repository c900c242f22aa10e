"""A feed-forward network whose GELU rides on its products: which, with what, and to the same values as its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda.tuning import SM_90
from flame_train.engine.ops.fused import feed_forward

BF16 = np.dtype(ml_dtypes.bfloat16)
WEIGHTS = {"first": (64, 24), "bias1": (64,), "second": (16, 64), "bias2": (16,)}


def found(device: str, biases: bool) -> list[np.ndarray]:
    """What is found for x, and x's gradient, to which another was sent before."""
    rng = np.random.default_rng(5)

    def drawn(*shape: int) -> flame.Tensor:
        return flame.tensor(rng.standard_normal(shape).astype(BF16), device=device)

    x, before, cotangent = drawn(2, 5, 24).requires_grad_(), drawn(2, 5, 24), drawn(2, 5, 16)
    made = {name: drawn(*shape) for name, shape in WEIGHTS.items()}
    bias1, bias2 = (made["bias1"], made["bias2"]) if biases else (None, None)
    y = F.feed_forward(x, made["first"], bias1, made["second"], bias2)
    (dx,) = flame.grad([y, x], [x], [cotangent, before])
    return [np.asarray(t.numpy(), np.float64) for t in (y, dx)]


@pytest.mark.parametrize("biases", [True, False])
def test_as_its_parts(gpu: Any, monkeypatch: pytest.MonkeyPatch, biases: bool) -> None:
    monkeypatch.setattr(feed_forward, "tuning_of", lambda _: replace(SM_90, gelu_epilogue_elements=0))
    products = list[Any]()
    product = gpu.kernels.cublaslt.product

    def seen(*args: Any, gelu: Any = None, **kwargs: Any) -> None:
        products.append(None if gelu is None else gelu.derivative)
        product(*args, gelu=gelu, **kwargs)

    monkeypatch.setattr(gpu.kernels.cublaslt, "product", seen)
    for got, want in zip(found("cuda", biases), found("cpu", biases), strict=True):
        np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02 * np.abs(want).max())
    assert products == [False, None, True, None]
