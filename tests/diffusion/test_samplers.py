"""Samplers on denoisers whose answer is known; parity is in tests/parity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flame_train.diffusion.flow import FlowPath, static_sigmas
from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.diffusion.samplers import SAMPLERS, guided
from flame_train.diffusion.samplers.noise_path import NoisePath
from flame_train.engine import Tensor, tensor
from flame_train.errors import ConfigError

SDXL = NoiseSchedule.scaled_linear()


def noise() -> Tensor:
    return tensor(np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32))


def fresh(step: int) -> Tensor:
    return tensor(np.random.default_rng(1 + step).standard_normal((2, 4, 4, 3)).astype(np.float32))


def oracle(prediction: str) -> Any:
    """The perfect denoiser of a world that holds one image, `cond`."""

    def denoise(x: Tensor, t: Tensor, cond: float) -> Tensor:
        abar = float(SDXL.alphas_cumprod[t.numpy()[0]])
        signal, sigma = math.sqrt(abar), math.sqrt(1 - abar)
        eps = (x - cond * signal) * (1 / sigma)
        return eps if prediction == "epsilon" else eps * signal - cond * sigma

    return denoise


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_perfect_denoiser_leads_to_its_image(sampler: str, spacing: str, prediction: str) -> None:
    path = NoisePath(SDXL, 8, prediction, spacing)
    out = SAMPLERS[sampler]().sample(oracle(prediction), noise(), 0.7, path, fresh)
    left = 4 * math.sqrt(1 - SDXL.alphas_cumprod[0]) if sampler == "ddim" else 1e-4
    np.testing.assert_allclose(out.numpy(), 0.7, atol=left)


@pytest.mark.parametrize("sampler", [name for name, kind in SAMPLERS.items() if kind.flow])
def test_the_perfect_velocity_leads_to_its_image(sampler: str) -> None:
    path = FlowPath(static_sigmas(6, 3.0))
    out = SAMPLERS[sampler]().sample(lambda x, s, cond: noise() - cond, noise(), 0.7, path, fresh)
    np.testing.assert_allclose(out.numpy(), 0.7, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_are_pure_and_record_nothing(sampler: str) -> None:
    start = noise()
    before = start.numpy().copy()
    weight = tensor(1.0, requires_grad=True)

    def denoise(x: Tensor, t: Tensor, cond: Any) -> Tensor:
        assert t.shape == (2,)
        return x * weight * 0.5

    draw = SAMPLERS[sampler]().sample
    first, second = (draw(denoise, start, None, NoisePath(SDXL, 5), fresh) for _ in range(2))
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    np.testing.assert_array_equal(start.numpy(), before)
    assert not first.requires_grad


def test_guidance_extrapolates_in_one_batch_and_a_guidance_of_one_asks_for_the_wanted_alone() -> None:
    batches = []

    def denoise(x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        batches.append((x.shape[0], t.shape[0]))
        return x * 0.5 + t.float().reshape(-1, 1, 1, 1) + cond.reshape(-1, 1, 1, 1)

    x, t = noise(), tensor(np.array([7, 9]))
    wanted, unwanted = np.array([3.0, 5.0], np.float32), np.array([1.0, -1.0], np.float32)
    base = x.numpy() * 0.5 + np.array([7.0, 9.0])[:, None, None, None]
    alone = guided(denoise, 1.0)(x, t, tensor(wanted))
    np.testing.assert_allclose(alone.numpy(), base + wanted[:, None, None, None], rtol=1e-6)
    both = guided(denoise, 4.0)(x, t, tensor(np.concatenate([wanted, unwanted])))
    far = unwanted + 4.0 * (wanted - unwanted)
    np.testing.assert_allclose(both.numpy(), base + far[:, None, None, None], rtol=1e-6)
    assert batches == [(2, 2), (4, 4)]


@pytest.mark.parametrize("steps", [0, 1000])
def test_steps_that_do_not_fit_are_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match=r"sample\.steps"):
        NoisePath(SDXL, steps)
