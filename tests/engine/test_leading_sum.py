"""Sums over many rows, which are taken in parts."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import Parameter, tensor
from flame_train.engine import functional as F
from flame_train.engine.graph import leading_sum


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((4096, 3), 1), ((2, 48, 64, 5), 3), ((4099, 2), 1), ((64, 64, 4097), 2), ((7, 3), 1), ((0, 3), 1)],
)
def test_whole_numbers_are_summed_exactly(shape: tuple[int, ...], axes: int) -> None:
    x = np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)
    found = leading_sum(x, axes, np.dtype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, x.astype(np.int64).sum(tuple(range(axes))))


def test_a_bias_gets_the_sum_of_its_gradients() -> None:
    x = tensor(np.ones((8, 1024, 4), np.float32))
    bias = Parameter(np.zeros(6, np.float32))
    F.linear(x, tensor(np.ones((6, 4), np.float32)), bias).sum().backward()
    assert bias.grad is not None
    assert (bias.grad.numpy() == 8 * 1024).all()
