"""Values at the ends of what numbers can be, where PyTorch's meaning is easy to miss: NaN, infinities, tiny numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

VALUES = (np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 2.5, -4.0, 3.0, -3.0, 1e-30, -1e-30)
ONE, OTHER = (np.array(v, np.float32) for v in zip(*itertools.product(VALUES, VALUES), strict=True))


def gradients(of: Any, tensor: Any, grad: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    leaves = [tensor(a, requires_grad=True) for a in arrays]
    return [np.asarray(g) for g in grad(of(*leaves).sum(), leaves)]


def check(ours: Any, theirs: Any, *arrays: np.ndarray) -> None:
    mine = gradients(ours, flame.tensor, flame.grad, *arrays)
    for got, want in zip(mine, gradients(theirs, torch.tensor, torch.autograd.grad, *arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("name", ["relu", "hardswish", "silu", "softplus", "leaky_relu"])
def test_an_activation_hides_no_gradient_where_it_is_not_a_number(name: str) -> None:
    x = np.array(VALUES, np.float32)
    x = np.concatenate([x] * 8)  # PyTorch's short arrays take another way than its long ones
    check(getattr(F, name), getattr(torch.nn.functional, name), x)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_nor_does_the_larger_of_a_pair(name: str) -> None:
    check(getattr(F, name), getattr(torch, name), ONE, OTHER)


@pytest.mark.parametrize("name", ["max", "min"])
def test_nor_does_the_largest_of_all(name: str) -> None:
    for values in ([1.0, np.nan, 3.0, np.nan], [np.inf, 2.0, np.inf], [1.0, 1.0, 0.0]):
        check(getattr(F, name), getattr(torch, name), np.array(values))


def test_dividing_by_what_is_nearly_nothing() -> None:
    tiny = np.array([1e-30, -1e-25, 1e-20, 3e-19, 1e20, 1e30], np.float32)
    check(F.div, torch.div, np.zeros(6, np.float32), tiny)
    check(F.div, torch.div, tiny * 0.5, tiny)


def test_a_probability_next_to_nothing_has_a_loss() -> None:
    p = np.array([1e-12, 1e-7, 1e-4, 0.0, 1.0, 0.5], np.float32)
    for target in (np.zeros_like(p), np.ones_like(p), np.full_like(p, 0.3)):
        got = F.binary_cross_entropy(flame.tensor(p), flame.tensor(target), reduction="none").numpy()
        want = torch.nn.functional.binary_cross_entropy(torch.tensor(p), torch.tensor(target), reduction="none")
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5)
