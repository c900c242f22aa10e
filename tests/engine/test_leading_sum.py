"""Sums over many numbers, whose error must not grow with how many they are."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import Parameter, tensor
from flame_train.engine import functional as F
from flame_train.engine.sums import leading_sum


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


@pytest.mark.parametrize(
    "name",
    [
        "sum",
        "mean",
        "var",
        "std",
        "norm",
        "cumsum",
        "logsumexp",
        "batch_norm_train",
        "running variance",
        "the gradient of a bias",
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_many_numbers_are_added_as_exactly_as_few(name: str, turned: bool) -> None:
    """fp32 against the same in fp64, on columns: what NumPy adds one by one."""
    x = (np.random.default_rng(0).random((200_001, 3)) + 10.0).astype(np.float32)
    x = np.asfortranarray(x) if turned else x

    def result(x: np.ndarray) -> np.ndarray:
        t = tensor(x, requires_grad=True)
        if name == "the gradient of a bias":
            bias = tensor(np.zeros(3, x.dtype), requires_grad=True)
            (t.detach() * (bias + t.detach())).sum().backward()
            assert bias.grad is not None
            return bias.grad.numpy()
        if name == "running variance":
            var = tensor(np.zeros(3, x.dtype))
            F.batch_norm(t.detach(), None, var, training=True, momentum=1.0)
            return var.numpy()
        if name == "batch_norm_train":
            y = F.batch_norm_train(t)
            (y * y * y).sum().backward()
            return y.numpy()
        return np.asarray(getattr(F, name)(t, *((2, 0) if name == "norm" else (0,))).numpy())

    np.testing.assert_allclose(result(x), result(x.astype(np.float64)), rtol=3e-6, atol=3e-5)
