"""Rectified flow against diffusers: sampling's noise levels, and the weights of the loss."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.diffusion.flow import constant_shift, dynamic_sigmas, resolution_shift, static_sigmas
from flame_train.diffusion.weightings import WEIGHTINGS

diffusers = pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity


@pytest.mark.parametrize("steps", [1, 4, 20, 28, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sd3s_noise_levels(steps: int, shift: float) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    np.testing.assert_allclose(static_sigmas(steps, shift), scheduler.sigmas.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("side", [512, 1024, 1536])
@pytest.mark.parametrize("steps", [1, 20, 28])
def test_fluxs_noise_levels(side: int, steps: int) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    tokens = (side // 16) ** 2
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    ours = dynamic_sigmas(steps, resolution_shift()(tokens))
    np.testing.assert_allclose(ours, scheduler.sigmas.numpy(), rtol=1e-6, atol=1e-7)


def test_schnells_noise_levels() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 4, 4))
    np.testing.assert_allclose(dynamic_sigmas(4, constant_shift(1.0)(0)), scheduler.sigmas.numpy(), rtol=1e-6)


@pytest.mark.parametrize("weighting", ["sigma_sqrt", "cosmap"])
def test_weights_of_the_loss(weighting: str) -> None:
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    s = np.linspace(0.01, 0.99, 50).astype(np.float32)
    theirs = compute_loss_weighting_for_sd3(weighting, torch.from_numpy(s)).numpy()
    np.testing.assert_allclose(WEIGHTINGS[weighting]().of_flow(s), theirs, rtol=1e-5)
