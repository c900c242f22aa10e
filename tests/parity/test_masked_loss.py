"""The masked loss is PyTorch's, in value and gradient, and errors outside a mask have no gradient at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flame_train.diffusion.flow import FlowObjective
from flame_train.diffusion.losses import LOSSES
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.engine import tensor

B, H, W, C = 3, 6, 8, 4


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, H, W, C)).astype(np.float32) for _ in range(3)]


def masks():
    """A box, no mask, and grey values: a batch may hold images with and without."""
    made = np.zeros((B, H, W, 1), np.float32)
    made[0, 2:4, 3:6] = 1.0
    made[1] = 1.0
    made[2] = np.random.default_rng(3).random((H, W, 1))
    return made


def flow():
    return FlowObjective(kind=LOSSES["mse"]()), np.array([0.2, 0.5, 0.9], np.float32)


def diffusion():
    return Objective(NoiseSchedule.scaled_linear(), kind=LOSSES["mse"]()), np.array([10, 500, 900])


@pytest.mark.parametrize("make", [flow, diffusion])
@pytest.mark.parametrize("factors", [masks(), np.array([1.0, 0.25, 0.0], np.float32).reshape(B, 1, 1, 1)])
def test_value_and_gradient_are_pytorchs(make, factors):
    objective, t = make()
    prediction, latents, noise = arrays()
    p = tensor(prediction, requires_grad=True)
    loss = objective.losses(p, tensor(latents), tensor(noise), tensor(t), tensor(factors)).mean()
    loss.backward()
    target = objective.target(tensor(latents), tensor(noise), tensor(t)).numpy()
    wanted = torch.tensor(prediction, requires_grad=True)
    errors = torch.nn.functional.mse_loss(wanted, torch.tensor(target), reduction="none")
    each = (errors * torch.tensor(factors)).mean(dim=(1, 2, 3))
    each.mean().backward()
    assert loss.item() == pytest.approx(each.mean().item(), rel=1e-6)
    np.testing.assert_allclose(p.grad.numpy(), wanted.grad.numpy(), rtol=1e-5, atol=1e-8)
    outside = np.broadcast_to(factors == 0.0, p.grad.shape)
    assert outside.any()
    assert (p.grad.numpy()[outside] == 0.0).all()
    assert (p.grad.numpy()[~outside] != 0.0).any()


@pytest.mark.parametrize("make", [flow, diffusion])
@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_factors_of_1_change_no_bit(make, kind):
    objective, t = make()
    prediction, latents, noise = map(tensor, arrays())
    plain = objective.losses(prediction, latents, noise, tensor(t)).numpy()
    ones = objective.losses(prediction, latents, noise, tensor(t), tensor(np.ones((B, H, W, 1), np.float32))).numpy()
    assert plain.tobytes() == ones.tobytes()
