"""Noise schedules, objectives and samplers against diffusers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.samplers import SAMPLERS, guided
from flame_train.diffusion.samplers.noise_path import NoisePath
from flame_train.diffusion.weightings.min_snr import MinSnr
from flame_train.engine import Tensor, tensor

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SDXL = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}


def theirs(kind: str, prediction: str = "epsilon", spacing: str = "leading", **more: Any) -> Any:
    extra = {"clip_sample": False, "set_alpha_to_one": False} if kind == "DDIMScheduler" else {}
    return getattr(diffusers, kind)(
        **SDXL, prediction_type=PREDICTIONS[prediction], timestep_spacing=spacing, steps_offset=1, **extra, **more
    )


def toy(x: Any, t: Any, cond: float) -> Any:
    """A smooth denoiser for either library: it depends on the place, the time and the condition."""
    return (x * 0.9 - (t * 0.001).reshape(-1, 1, 1, 1) * 0.3 + cond) * (1.0 - 0.02 * x)


def toy_flame(x: Tensor, t: Tensor, cond: Tensor | float) -> Tensor:
    return toy(x, t.to("float32"), cond)


def start(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 4, 5, 3)).astype(np.float32)


def fresh(step: int) -> Tensor:
    return tensor(start(1 + step))


def test_table_is_the_published_one_bit_for_bit() -> None:
    reference = diffusers.DDPMScheduler(**SDXL)
    np.testing.assert_array_equal(
        NoiseSchedule.scaled_linear().alphas_cumprod, reference.alphas_cumprod.numpy().astype(np.float64)
    )


def test_zero_terminal_snr() -> None:
    """diffusers goes through fp32 betas and back, which costs it about 1e-6 of the first value."""
    reference = diffusers.DDIMScheduler(**SDXL, rescale_betas_zero_snr=True)
    mine = NoiseSchedule.scaled_linear().zero_terminal_snr().alphas_cumprod
    np.testing.assert_allclose(mine, reference.alphas_cumprod.numpy(), rtol=1e-5, atol=1e-6)
    assert mine[-1] == 0.0


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("steps", [1, 3, 7, 20, 25, 30, 50, 333, 600])
def test_timesteps(spacing: str, steps: int) -> None:
    mine = NoiseSchedule.scaled_linear().timesteps(steps, spacing)
    for kind in ("DDIMScheduler", "EulerDiscreteScheduler"):
        reference = theirs(kind, spacing=spacing)
        reference.set_timesteps(steps)
        np.testing.assert_array_equal(mine, reference.timesteps.numpy())


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize(("sampler", "kind"), [("ddim", "DDIMScheduler"), ("euler", "EulerDiscreteScheduler")])
def test_trajectories(sampler: str, kind: str, steps: int, spacing: str, prediction: str) -> None:
    """Every point of the way, with guidance, seen through the denoiser's inputs, and the result."""
    reference = theirs(kind, prediction, spacing)
    reference.set_timesteps(steps)
    x = torch.tensor(start()) * reference.init_noise_sigma
    expected_way = []
    for t in reference.timesteps:
        seen = reference.scale_model_input(x, t)
        expected_way.append(seen.numpy())
        times = torch.full((2,), float(t))
        wanted, unwanted = toy(seen, times, 0.2), toy(seen, times, -0.1)
        x = reference.step(unwanted + 3.0 * (wanted - unwanted), t, x).prev_sample
    way = []

    def watched(x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        first, second = np.split(x.numpy(), 2)
        np.testing.assert_array_equal(first, second)
        way.append(first.copy())
        return toy_flame(x, t, cond)

    both = np.repeat(np.array([0.2, -0.1], np.float32), 2).reshape(4, 1, 1, 1)
    path = NoisePath(NoiseSchedule.scaled_linear(), steps, prediction, spacing)
    result = SAMPLERS[sampler]().sample(guided(watched, 3.0), tensor(start()), tensor(both), path, fresh)
    assert len(way) == steps
    for mine, expected in [*zip(way, expected_way, strict=True), (result.numpy(), x.numpy())]:
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_euler_on_zero_terminal_snr() -> None:
    reference = theirs("EulerDiscreteScheduler", "v", "trailing", rescale_betas_zero_snr=True)
    reference.set_timesteps(10)
    x = torch.tensor(start()) * reference.init_noise_sigma
    for t in reference.timesteps:
        seen = reference.scale_model_input(x, t)
        x = reference.step(toy(seen, torch.full((2,), float(t)), 0.2), t, x).prev_sample
    schedule = NoiseSchedule.scaled_linear().zero_terminal_snr()
    path = NoisePath(schedule, 10, "v", "trailing")
    result = SAMPLERS["euler"]().sample(toy_flame, tensor(start()), 0.2, path, fresh)
    np.testing.assert_allclose(result.numpy(), x.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_noised_and_target(prediction: Any) -> None:
    reference = theirs("DDIMScheduler", prediction)
    objective = Objective(NoiseSchedule.scaled_linear(), prediction)
    latents, noise = start(), start()[::-1].copy()
    t = np.array([17, 999])
    args = (torch.tensor(latents), torch.tensor(noise), torch.tensor(t))
    mine = (tensor(latents), tensor(noise), tensor(t))
    np.testing.assert_allclose(
        objective.noised(*mine).numpy(), reference.add_noise(*args).numpy(), rtol=1e-6, atol=1e-6
    )
    expected = args[1] if prediction == "epsilon" else reference.get_velocity(*args)
    np.testing.assert_allclose(objective.target(*mine).numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


def test_min_snr_weights_and_loss_gradient() -> None:
    """The formula of diffusers' text-to-image training scripts, and the gradient through torch."""
    from diffusers.training_utils import compute_snr

    reference = diffusers.DDPMScheduler(**SDXL)
    snr = compute_snr(reference, torch.arange(1000))
    clipped = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0]
    for prediction, divisor in (("epsilon", snr), ("v", snr + 1)):
        mine = MinSnr(snr_gamma=5.0).of_snr(NoiseSchedule.scaled_linear().snr, prediction)  # type: ignore[arg-type]
        np.testing.assert_allclose(mine, (clipped / divisor).numpy(), rtol=1e-5)

    objective = Objective(NoiseSchedule.scaled_linear(), weighting=MinSnr(snr_gamma=5.0))
    latents, noise, guess = start(), start()[::-1].copy(), start() * 0.5
    t = np.array([3, 700])
    p = tensor(guess, requires_grad=True)
    loss = objective.losses(p, tensor(latents), tensor(noise), tensor(t)).mean()
    loss.backward()
    q = torch.tensor(guess, requires_grad=True)
    weights = (clipped / snr)[torch.tensor(t)]
    each = torch.nn.functional.mse_loss(q, torch.tensor(noise), reduction="none").mean(dim=(1, 2, 3))
    expected = (each * weights).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-5, atol=1e-9)
