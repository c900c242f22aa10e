"""Convolutions and pools of one image or signal without a batch, as PyTorch takes them, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import flame_train.engine as flame
from flame_train.engine import functional as F

CASES: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "conv1d": (((3, 9), (4, 3, 3), (4,)), lambda f, x, w, b: f.conv1d(x, w, b, stride=2, padding=1)),
    "conv2d": (((4, 7, 6), (6, 2, 3, 3), (6,)), lambda f, x, w, b: f.conv2d(x, w, b, padding=1, groups=2)),
    "conv_transpose2d": (((3, 5, 4), (3, 2, 3, 3), (2,)), lambda f, x, w, b: f.conv_transpose2d(x, w, b, stride=2)),
    "max_pool2d": (((3, 6, 8),), lambda f, x: f.max_pool2d(x, 2)),
    "avg_pool2d": (((3, 6, 8),), lambda f, x: f.avg_pool2d(x, 3, 2, 1)),
    "adaptive_avg_pool2d": (((3, 6, 8),), lambda f, x: f.adaptive_avg_pool2d(x, (2, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_one_without_a_batch(name: str) -> None:
    shapes, call = CASES[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    ours = [flame.tensor(a, requires_grad=True) for a in arrays]
    want, made = call(torch.nn.functional, *theirs), call(F, *ours)
    np.testing.assert_allclose(made.numpy(), want.detach().numpy(), rtol=1e-10, atol=1e-12)
    g = rng.standard_normal(want.shape)
    grads = torch.autograd.grad(want, theirs, torch.tensor(g))
    for found, expected in zip(flame.grad(made, ours, flame.tensor(g)), grads, strict=True):
        assert found is not None
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-10, atol=1e-12)


def test_indices_of_one_without_a_batch() -> None:
    x = np.random.default_rng(0).standard_normal((3, 6, 8))
    values, indices = F.max_pool2d(flame.tensor(x), 2, return_indices=True)
    want = torch.nn.functional.max_pool2d(torch.tensor(x), 2, return_indices=True)
    np.testing.assert_array_equal(values.numpy(), want[0].numpy())
    np.testing.assert_array_equal(indices.numpy(), want[1].numpy())


def test_one_without_a_batch_and_channels_last() -> None:
    x = flame.tensor(np.random.default_rng(0).standard_normal((6, 8, 3)))
    assert (F.avg_pool2d(x, 2, layout="NHWC") == F.avg_pool2d(x.unsqueeze(0), 2, layout="NHWC")[0]).all().item()
