"""Losses and weightings against the formulas of sd-scripts, OneTrainer and the papers, with PyTorch's gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flame_train.diffusion.flow import FlowObjective
from flame_train.diffusion.losses import LOSSES
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.engine import tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

SDXL = NoiseSchedule.scaled_linear()
SHAPE = (3, 4, 5, 2)


def delta(schedule: str, c: float, scale: float, time: Any, sigma: Any) -> Any:
    """sd-scripts' `get_huber_threshold_if_needed`; its timesteps over 1000 are `time`."""
    if schedule == "exponential":
        return torch.exp(math.log(c) * time) * scale
    if schedule == "snr":
        return (1 - c) / (1 + sigma) ** 2 + c
    return torch.full_like(time, c * scale)


def conditional_loss(kind: str, guess: Any, target: Any, d: Any) -> Any:
    """sd-scripts' `conditional_loss` without its reduction."""
    d = d.view(-1, 1, 1, 1)
    if kind == "l1":
        return torch.nn.functional.l1_loss(guess, target, reduction="none")
    if kind == "huber":
        return 2 * d * (torch.sqrt((guess - target) ** 2 + d**2) - d)
    if kind == "smooth_l1":
        return 2 * (torch.sqrt((guess - target) ** 2 + d**2) - d)
    return torch.nn.functional.mse_loss(guess, target, reduction="none")


KINDS = [
    ("mse", {}),
    ("l1", {}),
    *(
        (kind, {"huber_schedule": schedule, "huber_c": 0.2, "huber_scale": 1.5})
        for kind in ("huber", "smooth_l1")
        for schedule in ("constant", "exponential", "snr")
    ),
]


@pytest.mark.parametrize("flow", [False, True], ids=["noise", "flow"])
@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
def test_losses_and_their_gradients(kind: str, keys: dict[str, Any], flow: bool) -> None:
    r = np.random.default_rng(0)
    latents, noise, guess = (r.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
    entry = LOSSES[kind](**keys)
    objective: Any = FlowObjective(kind=entry) if flow else Objective(SDXL, kind=entry)
    t = np.array([0.1, 0.5, 0.95], np.float32) if flow else np.array([3, 400, 999])
    p = tensor(guess, requires_grad=True)
    loss = objective.losses(p, tensor(latents), tensor(noise), tensor(t)).mean()
    loss.backward()
    q = torch.tensor(guess, dtype=torch.float64, requires_grad=True)
    abar = SDXL.alphas_cumprod
    time = torch.tensor(t if flow else t / 1000, dtype=torch.float64)
    sigma = torch.tensor(t / (1 - t) if flow else np.sqrt((1 - abar[t]) / abar[t]), dtype=torch.float64)
    d = delta(
        keys.get("huber_schedule", "constant"), keys.get("huber_c", 1.0), keys.get("huber_scale", 1.0), time, sigma
    )
    target = torch.tensor(noise - latents if flow else noise, dtype=torch.float64)
    expected = conditional_loss(kind, q, target, d).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-4, atol=1e-8)


def test_a_delta_by_noise_level_goes_with_zero_terminal_snr() -> None:
    objective = Objective(SDXL.zero_terminal_snr(), "v", kind=LOSSES["huber"](huber_schedule="snr", huber_c=0.25))
    x, noise = tensor(np.zeros(SHAPE, np.float32)), tensor(np.ones(SHAPE, np.float32))
    last = objective.losses(noise, x, noise, tensor(np.array([999, 999, 999]))).numpy()
    np.testing.assert_allclose(last, 2 * 0.25 * (math.sqrt(1.0 + 0.0625) - 0.25), rtol=1e-5)


def snr_weight(name: str, prediction: str, snr: Any) -> Any:
    """What each source says, in its own words."""
    v = prediction == "v"
    if name == "soft_min_snr":  # arXiv 2401.11605: of the error of x_0
        of_x0 = 1 / (1 / snr + 1 / 4)
        return of_x0 / (snr + 1) if v else of_x0 / snr
    limited = torch.minimum(snr, torch.ones_like(snr) * 1000)
    if name == "debiased":  # sd-scripts' apply_debiased_estimation
        return 1 / (limited + 1) if v else 1 / torch.sqrt(limited)
    return (1.0 + (snr + 1.0 if v else snr)) ** -1.5  # OneTrainer's __p2_loss_weight


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize(("name", "keys"), [("soft_min_snr", {}), ("debiased", {}), ("p2", {"p2_gamma": 1.5})])
def test_weightings(name: str, keys: dict[str, Any], prediction: str) -> None:
    mine = WEIGHTINGS[name](**keys).of_snr(SDXL.snr, prediction)
    np.testing.assert_allclose(mine, snr_weight(name, prediction, torch.tensor(SDXL.snr)).numpy(), rtol=1e-9)
    fixed = WEIGHTINGS[name](**keys).of_snr(SDXL.zero_terminal_snr().snr, "v")
    assert np.isfinite(fixed).all()
