"""Modules whose weights are trained."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import Parameter, nn, no_grad, tensor
from flame_train.engine import functional as F
from flame_train.engine.optim import AdamW


class Two(nn.Module):
    def __init__(self) -> None:
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


def test_weights_become_named_parameters_until_they_are_frozen() -> None:
    model = Two()
    model.init(np.random.default_rng(0), "bfloat16")
    assert not list(model.parameters())
    names = list(model.shapes())
    assert [name for name, _ in model.requires_grad_().named_parameters()] == names
    assert [p.name for p in model.parameters()] == names
    assert all(p.dtype == np.float32 and p.requires_grad for p in model.parameters())
    before = model.first.weight.numpy().copy()
    model.requires_grad_(False)
    assert not list(model.parameters())
    assert not model(tensor(np.ones((1, 3)))).requires_grad
    np.testing.assert_array_equal(model.first.weight.numpy(), before)


def test_an_optimizer_trains_them() -> None:
    model = Two()
    model.init(np.random.default_rng(0))
    optimizer = AdamW(model.requires_grad_().parameters(), lr=0.05)
    x = tensor(np.random.default_rng(1).standard_normal((64, 3)).astype(np.float32))
    y = tensor((x.numpy() @ np.array([[1.0, 0.0], [-1.0, 2.0], [0.5, 0.5]])).astype(np.float32))
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert isinstance(model.last.bias, Parameter)
    with no_grad():
        assert F.mse_loss(model(x), y).item() == pytest.approx(losses[-1], rel=0.5)


def test_what_is_not_loaded_cannot_be_trained() -> None:
    with pytest.raises(RuntimeError, match="declared but not loaded"):
        Two().requires_grad_()
