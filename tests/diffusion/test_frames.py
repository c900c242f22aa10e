"""Noise, levels and errors of latents with frames, (B, F, H, W, C)."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.diffusion.flow import FlowObjective
from flame_train.diffusion.losses.mse import Mse
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.noise.input_perturbation import InputPerturbation
from flame_train.diffusion.noise.offset import OffsetNoise
from flame_train.diffusion.noise.pyramid import PyramidNoise
from flame_train.diffusion.objectives import mean_errors
from flame_train.engine import tensor
from flame_train.engine.random import Rng

SHAPE = (2, 3, 8, 12, 4)


def rng() -> Rng:
    return Rng(np, 7, np.int64(5), np.arange(SHAPE[0]))


def latents() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def test_offset_noise_is_one_number_a_channel_for_all_frames() -> None:
    kind = OffsetNoise(offset_noise=0.5, offset_noise_random=True, offset_noise_adaptive=0.1)
    plain = Noise().drawn(rng(), tensor(latents())).numpy()
    offset = Noise((kind,)).drawn(rng(), tensor(latents())).numpy() - plain
    assert offset.shape == SHAPE
    np.testing.assert_allclose(offset, np.broadcast_to(offset[:, :1, :1, :1], SHAPE), atol=1e-5)
    assert np.ptp(offset[:, 0, 0, 0]) > 0.01


def test_pyramid_noise_of_frames_is_coarse_in_each_and_differs_between_them() -> None:
    made = Noise((PyramidNoise(pyramid_noise=4, pyramid_noise_discount=1.0),)).drawn(rng(), tensor(latents())).numpy()
    assert made.shape == SHAPE
    np.testing.assert_allclose(made.std(axis=(1, 2, 3, 4), ddof=1), 1.0, rtol=1e-4)
    neighbours = np.mean(made[:, :, :, 1:] * made[:, :, :, :-1])
    frames = np.mean(made[:, 1:] * made[:, :-1])
    assert neighbours > 0.2 > frames


def test_input_perturbation_of_frames() -> None:
    kind = InputPerturbation(input_perturbation=0.5, input_perturbation_random=True)
    noise = Noise((kind,)).drawn(rng(), tensor(latents()))
    added = Noise((kind,)).mixed(rng(), noise).numpy() - noise.numpy()
    assert added.shape == SHAPE
    assert (added.std(axis=(1, 2, 3, 4)) < 0.6).all()


def test_the_shift_counts_the_tokens_of_all_frames() -> None:
    counted: list[int] = []

    def shift(tokens: int) -> float:
        counted.append(tokens)
        return 1.0

    objective = FlowObjective(shift=shift)
    for shape in (SHAPE[1:], SHAPE[2:]):
        objective.timesteps(rng(), shape)
    assert counted == [3 * 8 * 12 // 4, 8 * 12 // 4]


@pytest.mark.parametrize("sides", [(8, 12), (1, 1)])
def test_weights_of_errors_hold_for_all_frames(sides: tuple[int, int]) -> None:
    target, weights = latents(), np.random.default_rng(1).random((2, 1, *sides, 1), np.float32)
    found = mean_errors(Mse(), tensor(np.zeros(SHAPE, np.float32)), tensor(target), None, tensor(weights))
    np.testing.assert_allclose(found.numpy(), (target**2 * weights).mean(axis=(1, 2, 3, 4)), rtol=1e-5)
