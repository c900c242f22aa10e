"""Samplers on denoisers whose answer is known; parity is in tests/parity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flame_train.diffusion.samplers import ddim, euler, guided
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine import Tensor, tensor
from flame_train.errors import ConfigError

SDXL = NoiseSchedule.scaled_linear()


def noise() -> Tensor:
    return tensor(np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32))


def oracle(prediction: str) -> Any:
    """The perfect denoiser of a world that holds one picture, `cond`."""

    def denoise(x: Tensor, t: Tensor, cond: float) -> Tensor:
        abar = float(SDXL.alphas_cumprod[t.numpy()[0]])
        signal, sigma = math.sqrt(abar), math.sqrt(1 - abar)
        eps = (x - cond * signal) * (1 / sigma)
        return eps if prediction == "epsilon" else eps * signal - cond * sigma

    return denoise


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("sampler", [ddim, euler])
def test_the_perfect_denoiser_leads_to_its_picture(sampler: Any, spacing: str, prediction: str) -> None:
    out = sampler(oracle(prediction), noise(), 0.7, SDXL, 8, prediction=prediction, spacing=spacing)
    left = 1e-4 if sampler is euler else 4 * math.sqrt(1 - SDXL.alphas_cumprod[0])
    np.testing.assert_allclose(out.numpy(), 0.7, atol=left)


@pytest.mark.parametrize("sampler", [ddim, euler])
def test_samplers_are_pure_and_record_nothing(sampler: Any) -> None:
    start = noise()
    before = start.numpy().copy()
    weight = tensor(1.0, requires_grad=True)

    def denoise(x: Tensor, t: Tensor, cond: Any) -> Tensor:
        assert t.shape == (2,)
        return x * weight * 0.5

    first, second = (sampler(denoise, start, None, SDXL, 5) for _ in range(2))
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    np.testing.assert_array_equal(start.numpy(), before)
    assert not first.requires_grad


def test_guidance_of_one_asks_once_and_more_extrapolates() -> None:
    calls = []

    def denoise(x: Tensor, t: Tensor, cond: float) -> Tensor:
        calls.append(cond)
        return x * 0.0 + cond

    x, t = noise(), tensor(np.zeros(2, np.int64))
    assert guided(denoise, 1.0)(x, t, (3.0, 1.0)).numpy().flat[0] == 3.0
    assert calls == [3.0]
    assert guided(denoise, 4.0)(x, t, (3.0, 1.0)).numpy().flat[0] == 1.0 + 4.0 * 2.0


@pytest.mark.parametrize("steps", [0, 1000])
@pytest.mark.parametrize("sampler", [ddim, euler])
def test_steps_that_do_not_fit_are_refused(sampler: Any, steps: int) -> None:
    with pytest.raises(ConfigError, match=r"sample\.steps"):
        sampler(oracle("epsilon"), noise(), 0.0, SDXL, steps)
