"""Gradient tools on plain leaves."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine import Tensor, tensor
from flame_train.engine.mode import capturing
from flame_train.engine.optim import (
    add_noise_,
    clip_each_grad_norm_,
    clip_grad_norm_,
    clip_grad_value_,
    normalize,
    statistics,
)


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


def test_clip_each_norm_leaves_small_gradients_alone() -> None:
    ts = leaves([3.0, 4.0], [0.3, 0.4], [[0.0]])
    np.testing.assert_allclose(clip_each_grad_norm_(ts, 1.0).numpy(), [5, 0.5, 0])
    np.testing.assert_allclose(values(ts), [0.6, 0.8, 0.3, 0.4, 0], rtol=1e-6)
    assert clip_each_grad_norm_([], 1.0).shape == (0,)


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


def test_normalize_scales_up_and_down_and_keeps_zeros() -> None:
    for size in (1e-4, 1e4):
        ts = leaves([3 * size], [4 * size])
        assert normalize(ts, 2.0).item() == pytest.approx(5 * size)
        np.testing.assert_allclose(values(ts), [1.2, 1.6], rtol=1e-6)
    ts = leaves([0.0])
    normalize(ts)
    assert values(ts) == [0.0]


def test_noise_has_its_size_and_follows_seed_and_step() -> None:
    def noise(seed: int, step: int) -> np.ndarray:
        ts = leaves(np.zeros(5000), np.zeros((10, 500)))
        add_noise_(ts, 0.1, seed=seed, step=step)
        return values(ts)

    first = noise(1, 0)
    assert first.std() == pytest.approx(0.1, rel=4 / math.sqrt(2 * 10_000))
    assert abs(np.corrcoef(first[:5000], first[5000:])[0, 1]) < 5 / math.sqrt(5000)
    np.testing.assert_array_equal(first, noise(1, 0))
    assert not (first == noise(1, 1)).any()
    assert not (first == noise(2, 0)).any()


def test_noise_anneals() -> None:
    def size(step: int) -> float:
        ts = leaves(np.zeros(20_000))
        add_noise_(ts, 0.1, seed=0, step=step, decay=0.55)
        return float(values(ts).std())

    assert size(0) == pytest.approx(0.1, rel=0.03)
    assert size(99) == pytest.approx(0.1 * 100**-0.275, rel=0.03)


def test_statistics_reads_nothing_until_asked() -> None:
    ts = leaves([3.0, 4.0])
    with capturing():
        s = statistics(ts)
        with pytest.raises(RuntimeError, match="reads nothing back"):
            _ = s.norm
    assert s.norm == 5.0


def test_statistics() -> None:
    s = statistics([*leaves([0.0, 3.0, -4.0, math.nan], [[1e-20, 1e9, -math.inf, 0.0]])])
    assert s.count == 8
    assert s.zeros == 0.25
    assert s.non_finite == 0.25
    assert s.largest == pytest.approx(1e9)
    assert s.norm == pytest.approx(1e9)
    assert sum(s.histogram) == 4
    assert s.histogram[0] == 1
    assert s.histogram[-1] == 1
    assert s.histogram[s.edges.index(0)] == 2
    assert statistics([]).count == 0


def test_fp64_gradients_stay_fp64() -> None:
    t = tensor(np.array([3e60, 4e60]), requires_grad=True)
    t.grad = tensor(np.array([3e60, 4e60]))
    assert statistics(t).largest == 4e60
    assert clip_each_grad_norm_(t, 1e60, "inf").item() == 4e60
    assert normalize(t, 10.0).item() == pytest.approx(1.25e60, rel=1e-12)
    np.testing.assert_allclose(values([t]), [6.0, 8.0], rtol=1e-12)
    add_noise_(t, 1e-12, seed=1)
    assert 0 < abs(values([t]) - [6.0, 8.0]).max() < 1e-11
