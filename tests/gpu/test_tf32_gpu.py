"""Products and convolutions of fp32 in TF32: less exact by as much as that says, and only where it was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.mode import deterministic as deterministic_mode

pytestmark = pytest.mark.gpu

_ROUNDING = 2.0**-11  # of an operand to TF32, which keeps 10 bits


def matmul() -> tuple[Callable[..., Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return (lambda a, b: a @ b), rng.standard_normal((512, 768)), rng.standard_normal((768, 640))


def convolution() -> tuple[Callable[..., Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 32, 32, 128)), rng.standard_normal((64, 128, 3, 3))
    return (lambda x, w: F.conv2d(x, w, padding=1, layout="NHWC")), x, w


@pytest.mark.parametrize("work", [matmul, convolution])
@pytest.mark.parametrize("deterministic", [True, False])
def test_results_and_gradients(work: Any, deterministic: bool) -> None:
    fn, a, b = work()

    def run(device: str, dtype: Any) -> list[np.ndarray[Any, Any]]:
        left, right = (flame.tensor(x.astype(dtype), device=device, requires_grad=True) for x in (a, b))
        out = fn(left, right)
        (out * out).sum().backward()
        return [t.numpy().astype(np.float64) for t in (out, left.grad, right.grad)]

    exact = run("cpu", np.float64)

    def off(precision: Any) -> list[float]:
        with deterministic_mode(deterministic), flame.set_float32_matmul_precision(precision):
            found = run("cuda", np.float32)
        return [float(np.abs(f - e).max() / np.abs(e).max()) for f, e in zip(found, exact, strict=True)]

    full, rounded = off("highest"), off("high")
    assert max(full) < 1e-5  # sums of fp32 over all pixels; seen were 3e-6
    assert all(1e-5 < error < 4 * _ROUNDING for error in rounded)
    assert off("highest") == full
