"""Gradient tools on plain leaves."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine import Tensor, tensor
from flame_train.engine.optim import clip_grad_norm_, clip_grad_value_


def leaves(*grads: object, dtype: object = np.float32) -> list[Tensor]:
    result = []
    for g in grads:
        a = np.asarray(g, np.float32).astype(dtype)
        t = tensor(a, requires_grad=True)
        t.grad = tensor(a)
        result.append(t)
    return result


def values(ts: list[Tensor]) -> np.ndarray:
    return np.concatenate([t.grad.numpy().astype(np.float64).ravel() for t in ts])


def test_clip_norm_scales_down_only_and_edits_in_place() -> None:
    ts = leaves([[3.0]], [4.0, 0.0])
    buffer = ts[0].grad.data
    assert clip_grad_norm_([*ts, tensor([1.0], requires_grad=True)], 10.0).item() == 5.0
    np.testing.assert_array_equal(values(ts), [3, 4, 0])
    assert clip_grad_norm_(ts, 1.0).item() == 5.0
    np.testing.assert_allclose(values(ts), [0.6, 0.8, 0], rtol=1e-6)
    assert ts[0].grad.data is buffer
    assert clip_grad_norm_(leaves([3.0, -7.0]), 1.0, math.inf).item() == 7.0
    assert clip_grad_norm_(leaves([3.0, -7.0], [2.0]), 1.0, 1.0).item() == 12.0
    assert clip_grad_norm_([], 1.0).item() == 0.0
    one = leaves([3.0])[0]
    clip_grad_norm_(one, 1.0)
    assert one.grad.item() == pytest.approx(1.0)


def test_clip_norm_can_refuse_what_is_not_finite() -> None:
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        clip_grad_norm_(leaves([math.inf]), 1.0, error_if_nonfinite=True)


def test_low_precision_gradients_are_computed_in_fp32() -> None:
    ts = leaves(np.full(4096, 3.0), dtype=ml_dtypes.bfloat16)
    assert clip_grad_norm_(ts, 1.0).item() == pytest.approx(192.0)
    assert ts[0].grad.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(values(ts), 1 / 64, rtol=2**-8)


def test_clip_value() -> None:
    ts = leaves([-3.0, 0.5, 2.0])
    clip_grad_value_(ts, 1.0)
    np.testing.assert_array_equal(values(ts), [-1, 0.5, 1])


def test_fp64_gradients_stay_fp64() -> None:
    t = tensor(np.array([3e60, 4e60]), requires_grad=True)
    t.grad = tensor(np.array([3e60, 4e60]))
    assert clip_grad_norm_(t, 1e60, "inf").item() == 4e60
    np.testing.assert_allclose(values([t]), [7.5e59, 1e60], rtol=1e-12)
