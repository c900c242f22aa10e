"""The error function against the C library's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flame_train.engine.ops.common.special import erf


def exact(x):
    return np.array([math.erf(v) for v in x.astype(np.float64).ravel()]).reshape(x.shape)


@pytest.mark.parametrize(("dtype", "ulps"), [(np.float32, 1.0), (np.float64, 4.0)])
def test_accuracy_over_the_whole_line(dtype, ulps):
    rng = np.random.default_rng(0)
    x = np.concatenate([np.geomspace(1e-30, 12, 20_000), rng.uniform(0, 6, 40_000)]).astype(dtype)
    x = np.concatenate([x, -x])
    expected = exact(x)
    error = np.abs(erf(np, x) - expected) / np.spacing(np.abs(expected).astype(dtype))
    assert error.max() <= ulps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ends_zeros_and_shapes(dtype):
    x = np.array([[0.0, -0.0, np.inf], [-np.inf, np.nan, 4.5]], dtype)
    found = erf(np, x.T)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, exact(x.T).astype(dtype))
    assert np.signbit(found[1, 0])
    assert erf(np, np.zeros((0, 3), dtype)).shape == (0, 3)
