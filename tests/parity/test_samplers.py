"""Samplers against diffusers' schedulers of the same methods, and DPM-Solver++ against k-diffusion's formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flame_train.diffusion.flow import FlowPath, dynamic_sigmas, static_sigmas
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.diffusion.samplers.noise_path import NoisePath
from flame_train.engine import Tensor, tensor
from tests.parity.test_diffusion import fresh, start, theirs, toy, toy_flame

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ABAR = NoiseSchedule.scaled_linear().alphas_cumprod


def drawn(sampler: str, steps: int, prediction: Any, spacing: Any) -> np.ndarray:
    path = NoisePath(NoiseSchedule.scaled_linear(), steps, prediction, spacing)
    return SAMPLERS[sampler]().sample(toy_flame, tensor(start()), 0.2, path, fresh).numpy()


def close(mine: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(mine, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_heun(steps: int, spacing: str, prediction: str) -> None:
    """diffusers lists every timestep but the first twice, once for each slope."""
    reference = theirs("HeunDiscreteScheduler", prediction, spacing)
    reference.set_timesteps(steps)
    x = torch.tensor(start()) * reference.init_noise_sigma
    for t in reference.timesteps:
        seen = reference.scale_model_input(x, t)
        x = reference.step(toy(seen, torch.full((2,), float(t)), 0.2), t, x).prev_sample
    close(drawn("heun", steps, prediction, spacing), x.numpy())


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_euler_ancestral(steps: int, spacing: str, prediction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise in each step."""
    from diffusers.schedulers import scheduling_euler_ancestral_discrete as module

    reference = theirs("EulerAncestralDiscreteScheduler", prediction, spacing)
    reference.set_timesteps(steps)
    noises = iter(range(steps))
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.tensor(start(1 + next(noises))))
    x = torch.tensor(start()) * reference.init_noise_sigma
    for t in reference.timesteps:
        seen = reference.scale_model_input(x, t)
        x = reference.step(toy(seen, torch.full((2,), float(t)), 0.2), t, x).prev_sample
    close(drawn("euler_ancestral", steps, prediction, spacing), x.numpy())


def k_diffusion_dpmpp_2m(model: Any, x: np.ndarray, sigmas: np.ndarray) -> np.ndarray:
    """`sample_dpmpp_2m` of k-diffusion, on NumPy in fp64; `model(x, i)` gives the image at sigma number i."""
    old = None
    for i in range(len(sigmas) - 1):
        denoised = model(x, i)
        last = sigmas[i + 1] == 0
        t, t_next = -np.log(sigmas[i]), np.inf if last else -np.log(sigmas[i + 1])
        h = t_next - t
        if old is None or last:
            x = (sigmas[i + 1] / sigmas[i]) * x - np.expm1(-h) * denoised
        else:
            r = (t + np.log(sigmas[i - 1])) / h
            denoised_d = (1 + 1 / (2 * r)) * denoised - (1 / (2 * r)) * old
            x = (sigmas[i + 1] / sigmas[i]) * x - np.expm1(-h) * denoised_d
        old = denoised
    return x


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_dpmpp_2m_is_k_diffusions(steps: int, spacing: str, prediction: str) -> None:
    times = NoiseSchedule.scaled_linear().timesteps(steps, spacing)
    sigmas = np.append(np.sqrt((1 - ABAR[times]) / ABAR[times]), 0.0)

    def image(x: np.ndarray, i: int) -> np.ndarray:
        seen = x / math.sqrt(sigmas[i] ** 2 + 1)
        out = toy(seen, np.full(2, float(times[i])), 0.2)
        if prediction == "epsilon":
            return x - sigmas[i] * out
        return x / (sigmas[i] ** 2 + 1) - out * sigmas[i] / math.sqrt(sigmas[i] ** 2 + 1)

    scale = math.sqrt(sigmas[0] ** 2 + 1) if spacing == "leading" else sigmas[0]
    expected = k_diffusion_dpmpp_2m(image, start().astype(np.float64) * scale, sigmas)
    close(drawn("dpmpp_2m", steps, prediction, spacing), expected)


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_dpmpp_2m_is_diffusers_where_both_take_the_same_timesteps(steps: int) -> None:
    """diffusers scales x so that its variance is 1, which changes nothing else."""
    reference = theirs("DPMSolverMultistepScheduler", "epsilon", "trailing", final_sigmas_type="zero")
    reference.set_timesteps(steps)
    times = NoiseSchedule.scaled_linear().timesteps(steps, "trailing")
    np.testing.assert_array_equal(reference.timesteps.numpy(), times)
    first = math.sqrt((1 - ABAR[times[0]]) / ABAR[times[0]])
    x = torch.tensor(start()) * first / math.sqrt(first**2 + 1)
    for t in reference.timesteps:
        x = reference.step(toy(x, torch.full((2,), float(t)), 0.2), t, x).prev_sample
    close(drawn("dpmpp_2m", steps, "epsilon", "trailing"), x.numpy())


@pytest.mark.parametrize("kind", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
@pytest.mark.parametrize("steps", [1, 4, 20])
@pytest.mark.parametrize("sigmas", ["static", "dynamic"])
def test_flow(kind: str, steps: int, sigmas: str) -> None:
    """The levels are put into diffusers' scheduler, whose own ones for Heun's method differ in their last digits."""
    levels = static_sigmas(steps, 3.0) if sigmas == "static" else dynamic_sigmas(steps, 2.0)
    reference = getattr(diffusers, kind)(shift=1.0)
    reference.set_timesteps(steps)
    given = torch.tensor(levels, dtype=torch.float32)
    times = given[:-1] * 1000
    if "Heun" in kind:
        reference.timesteps = torch.cat([times[:1], times[1:].repeat_interleave(2)])
        reference.sigmas = torch.cat([given[:1], given[1:-1].repeat_interleave(2), given[-1:]])
    else:
        reference.timesteps, reference.sigmas = times, given
    x = torch.tensor(start())
    for t in reference.timesteps:
        x = reference.step(toy(x, torch.full((2,), float(t)), 0.2), t, x).prev_sample

    def velocity(x: Tensor, s: Tensor, cond: float) -> Tensor:
        return toy(x, s * 1000.0, cond)

    name = "heun" if "Heun" in kind else "euler"
    mine = SAMPLERS[name]().sample(velocity, tensor(start()), 0.2, FlowPath(levels), fresh)
    close(mine.numpy(), x.numpy())
