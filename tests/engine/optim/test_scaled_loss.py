"""Training in fp16: one call scales and runs backward, and a loss that was not scaled is refused. Metrics by name."""

from __future__ import annotations

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import optim


def trained(scaler: optim.LossScaler | None) -> tuple[flame.Tensor, optim.Optimizer]:
    x = flame.tensor(np.array([1.0, -2.0], np.float32), requires_grad=True)
    arena = optim.FlatParameters([("x", x)])
    return x, optim.Optimizer(arena, [optim.SGDRule()], lr=0.25, scaler=scaler)


def test_one_call_scales_and_runs_backward() -> None:
    plain, other = trained(None)
    plain.square().sum().backward()
    other.step()
    for scaler in (None, optim.LossScaler()):
        x, optimizer = trained(scaler)
        optimizer.backward(x.square().sum())
        optimizer.step()
        assert x.tolist() == plain.tolist() == [0.5, -1.0]


def test_a_loss_that_was_not_scaled_is_refused_before_anything_moves() -> None:
    x, optimizer = trained(optim.LossScaler())
    for _ in range(2):
        x.square().sum().backward()
        with pytest.raises(RuntimeError, match=r"call optimizer.backward\(loss\) instead of loss.backward\(\)"):
            optimizer.step()
        assert x.tolist() == [1.0, -2.0]
    optimizer.zero_grad()
    optimizer.backward(x.square().sum())
    optimizer.step()
    optimizer.zero_grad()
    x.square().sum().backward()
    with pytest.raises(RuntimeError, match="instead of"):  # after a right step, too
        optimizer.step()
    by_hand, optimizer = trained(optim.LossScaler())
    (by_hand.square().sum() * optimizer.loss_scale).backward()
    optimizer.step()
    assert by_hand.tolist() == [0.5, -1.0]
    with pytest.raises(TypeError, match="expected the loss, a Tensor, got float"):
        optimizer.backward(1.0)


def test_metrics_have_names() -> None:
    x, optimizer = trained(optim.LossScaler())
    optimizer.backward(x.square().sum())
    optimizer.step()
    found = {name: t.item() for name, t in optimizer.metrics().items()}
    assert found["grad_norm"] == pytest.approx(20**0.5)
    assert (found["count"], found["lr"], found["loss_scale"], found["skipped"]) == (1, 0.25, 65536, 0)
    assert list(found.values()) == optimizer.metric_values.tolist()


@pytest.mark.parity
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_pytorchs(decay: float) -> None:
    torch = pytest.importorskip("torch")
    start = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    ours, theirs = flame.tensor(start, requires_grad=True), torch.from_numpy(start.copy()).requires_grad_()
    mine = optim.Adam([ours], lr=0.05, betas=(0.8, 0.95), weight_decay=decay)
    other = torch.optim.Adam([theirs], lr=0.05, betas=(0.8, 0.95), weight_decay=decay)
    for _ in range(20):
        mine.zero_grad()
        other.zero_grad()
        (ours * ours.sin()).sum().backward()
        (theirs * theirs.sin()).sum().backward()
        mine.step()
        other.step()
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=2e-5, atol=1e-6)
