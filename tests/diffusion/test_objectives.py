"""What a denoiser is asked, and how its answer is judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flame_train.config.schema import LossSection
from flame_train.diffusion.flow import FlowObjective
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.timestep_sampling.beta import Beta
from flame_train.diffusion.timestep_sampling.listed import Listed
from flame_train.diffusion.timestep_sampling.logit_normal import LogitNormal
from flame_train.diffusion.timestep_sampling.mode_cosmap import CosmapSampling
from flame_train.diffusion.timestep_sampling.uniform import Uniform
from flame_train.diffusion.weightings.min_snr import MinSnr
from flame_train.diffusion.weightings.none import NoWeighting
from flame_train.engine import Tensor, capture, tensor
from flame_train.engine.random import Rng
from flame_train.engine.shape_run import shape_run

SDXL = NoiseSchedule.scaled_linear()


def rng(samples: object, step: int = 0, seed: int = 42) -> Rng:
    return Rng(np, seed, step, np.asarray(samples))


def blank(*shape: int) -> Tensor:
    return tensor(np.zeros(shape, np.float32))


def offset_noise(strength: float) -> Noise:
    return Noise.of(LossSection(offset_noise=strength))


def latents(batch: int = 3) -> Tensor:
    return tensor(np.random.default_rng(1).standard_normal((batch, 4, 6, 2)).astype(np.float32))


def test_timesteps_are_uniform_over_the_schedule() -> None:
    t = Objective(SDXL).timesteps(rng(range(50_000))).numpy()
    assert t.dtype == np.int64
    assert (t.min(), t.max()) == (0, 999)
    counts = np.bincount(t // 100, minlength=10)
    assert float(((counts - 5000.0) ** 2 / 5000.0).sum()) < 27.9  # chi-square, 9 degrees, one in a thousand


def test_levels_of_any_sampling_become_timesteps_of_the_span() -> None:
    span = (200, 700)
    for sampling in (LogitNormal(logit_mean=0.5), Beta(), CosmapSampling()):
        t = Objective(SDXL, sampling=sampling, span=span).timesteps(rng(range(20_000))).numpy()
        levels = FlowObjective(sampling).timesteps(rng(range(20_000)), (8, 8, 4)).numpy()
        np.testing.assert_array_equal(t, 200 + np.minimum(np.floor(levels * np.float32(500)), 499))
    t = Objective(SDXL, span=span).timesteps(rng(range(50_000))).numpy()
    assert (t.min(), t.max()) == (200, 699)
    counts = np.bincount((t - 200) // 50, minlength=10)
    assert float(((counts - 5000.0) ** 2 / 5000.0).sum()) < 27.9


def test_every_listed_timestep_is_that_timestep() -> None:
    for t in range(1000):
        assert Objective(SDXL, sampling=Listed(timestep_list=(t,))).timesteps(rng([0])).item() == t


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_a_sample_gets_the_same_draws_in_any_batch_but_others_at_another_step(offset: float) -> None:
    o = Objective(SDXL, noise=offset_noise(offset))
    whole_t, whole = o.timesteps(rng(range(4))).numpy(), o.noise(rng(range(4)), blank(4, 3, 5, 2)).numpy()
    for i in range(4):
        assert o.timesteps(rng([i])).numpy() == whole_t[i]
        np.testing.assert_array_equal(o.noise(rng([i]), blank(1, 3, 5, 2)).numpy()[0], whole[i])
    assert not (o.noise(rng(range(4), step=1), blank(4, 3, 5, 2)).numpy() == whole).any()


def test_offset_noise_adds_one_number_to_each_channel_of_each_sample() -> None:
    plain = Objective(SDXL).noise(rng(range(500)), blank(500, 2, 3, 4)).numpy()
    offset = Objective(SDXL, noise=offset_noise(0.1)).noise(rng(range(500)), blank(500, 2, 3, 4)).numpy() - plain
    assert np.ptp(offset, axis=(1, 2)).max() < 1e-6
    each = offset[:, 0, 0, :]
    assert each.std() == pytest.approx(0.1, rel=4 / math.sqrt(2 * 2000))
    assert abs(np.corrcoef(each.T) - np.eye(4)).max() < 5 / math.sqrt(500)


def test_noised_keeps_unit_variance_and_the_dtype() -> None:
    o = Objective(SDXL)
    x, t = latents(), tensor(np.array([0, 500, 999]))
    noise = o.noise(rng(range(3)), x)
    abar = SDXL.alphas_cumprod[[0, 500, 999]].reshape(3, 1, 1, 1)
    expected = np.sqrt(abar) * x.numpy() + np.sqrt(1 - abar) * noise.numpy()
    np.testing.assert_allclose(o.noised(x, noise, t).numpy(), expected, rtol=1e-5, atol=1e-6)
    half = o.noised(x.to("bfloat16"), noise, t)
    assert half.dtype.name == "bfloat16"


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_the_target_and_the_noised_latents_give_the_image_back(prediction: str) -> None:
    o = Objective(SDXL, prediction)
    x, t = latents(), tensor(np.array([3, 400, 990]))
    noise = o.noise(rng(range(3)), x)
    seen, target = o.noised(x, noise, t).numpy(), o.target(x, noise, t).numpy()
    abar = SDXL.alphas_cumprod[[3, 400, 990]].reshape(3, 1, 1, 1)
    if prediction == "v":
        back = np.sqrt(abar) * seen - np.sqrt(1 - abar) * target
    else:
        back = (seen - np.sqrt(1 - abar) * target) / np.sqrt(abar)
    np.testing.assert_allclose(back, x.numpy(), atol=2e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("gamma", [0.0, 5.0])
def test_loss_is_the_weighted_mean_and_its_gradient_is_exact(prediction: str, gamma: float) -> None:
    o = Objective(SDXL, prediction, weighting=MinSnr(snr_gamma=gamma) if gamma else NoWeighting())
    x, t = latents(), np.array([3, 400, 990])
    noise = o.noise(rng(range(3)), x)
    guess = tensor(np.random.default_rng(5).standard_normal(x.shape).astype(np.float32), requires_grad=True)
    loss = o.losses(guess, x, noise, tensor(t)).mean()
    loss.backward()
    snr = SDXL.alphas_cumprod[t] / (1 - SDXL.alphas_cumprod[t])
    weight = np.ones(3)
    if gamma:
        weight = np.minimum(snr, gamma) / (snr if prediction == "epsilon" else snr + 1)
    difference = guess.numpy().astype(np.float64) - o.target(x, noise, tensor(t)).numpy()
    each = (difference**2).mean(axis=(1, 2, 3)) * weight
    np.testing.assert_allclose(o.losses(guess, x, noise, tensor(t)).numpy(), each, rtol=1e-5)
    assert loss.item() == pytest.approx(each.mean(), rel=1e-5)
    assert loss.shape == ()
    expected = 2 * difference * weight.reshape(3, 1, 1, 1) / difference.size
    np.testing.assert_allclose(guess.grad.numpy(), expected, rtol=1e-4, atol=1e-9)


def test_half_precision_predictions_are_judged_in_fp32() -> None:
    o = Objective(SDXL)
    x, t = latents(1), tensor(np.array([5]))
    noise = o.noise(rng([0]), x)
    guess = (x * 300.0).to("float16")
    loss = o.losses(guess, x, noise, t).mean()
    assert loss.dtype.name == "float32"
    expected = ((guess.numpy().astype(np.float64) - noise.numpy()) ** 2).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert expected > 65504  # it would have overflowed


def test_min_snr_on_zero_terminal_snr() -> None:
    fixed = SDXL.zero_terminal_snr()
    assert MinSnr(snr_gamma=5.0).of_snr(fixed.snr, "v")[-1] == 0.0
    assert Objective(fixed, "v", weighting=MinSnr(snr_gamma=5.0)).prediction == "v"
    with pytest.raises(ValueError, match="needs prediction 'v'"):
        Objective(fixed, "epsilon")


def test_every_kind_of_noise_and_timestep_is_captured_without_a_read_or_a_copy() -> None:
    """The step runs on shapes alone, where what is read back would be zeros and what is sent would be counted."""
    loss = LossSection(
        offset_noise=0.1,
        offset_noise_random=True,
        offset_noise_adaptive=0.1,
        pyramid_noise=6,
        immiscible_noise=True,
        input_perturbation=0.1,
        input_perturbation_random=True,
    )
    with shape_run() as run:
        xp = run.backend.xp
        x, samples = Tensor(xp.zeros((8, 16, 12, 4), np.float32)), xp.zeros(8, np.int64)
        for sampling in (Beta(), Listed(timestep_list=(3, 5)), Uniform()):
            o = Objective(SDXL, sampling=sampling, noise=Noise.of(loss), device="cuda")

            def step(o: Objective = o) -> None:
                r = Rng(xp, 1, 0, samples)
                noise, t = o.noise(r, x), o.timesteps(r)
                o.noised(x, o.mixed(r, noise), t)

            captured = capture(step, "cuda")
            for _ in range(3):
                captured()
