"""Rectified flow: where it samples, what it asks, and the way back."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import special

from flame_train.config.schema import LossSection
from flame_train.diffusion.flow import (
    FlowObjective,
    FlowPath,
    constant_shift,
    dynamic_sigmas,
    resolution_shift,
    shifted,
    static_sigmas,
)
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.samplers.euler import Euler
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS, TimestepSampling
from flame_train.diffusion.timestep_sampling.logit_normal import LogitNormal
from flame_train.diffusion.timestep_sampling.uniform import Uniform
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.diffusion.weightings.flow_weights import SigmaSqrt
from flame_train.engine import Tensor, tensor
from flame_train.engine.random import Rng
from flame_train.errors import ConfigError

SHAPE = (8, 6, 16)


def rng(samples: object, step: int = 0) -> Rng:
    return Rng(np, 42, step, np.asarray(samples))


def blank(batch: int) -> Tensor:
    return tensor(np.zeros((batch, *SHAPE), np.float32))


def chosen(name: str) -> TimestepSampling:
    normal = {"logit_mean": 0.3, "logit_std": 1.2}
    keys = {"logit_normal": normal, "sigmoid": normal, "beta": {"beta_a": 0.6, "beta_b": 1.5}}
    return TIMESTEP_SAMPLINGS[name](**keys.get(name, {}))


def below(sampling: str, s: float) -> float:
    """P(sigma < s) before the shift: the distributions of arXiv 2403.03206, section 3.1, integrated."""
    if sampling == "uniform":
        return s
    if sampling in ("logit_normal", "sigmoid"):
        return NormalDist(0.3, 1.2).cdf(math.log(s / (1.0 - s)))
    if sampling == "beta":
        return float(special.betainc(0.6, 1.5, s))
    if sampling == "cosmap":  # its density is 2 / (pi (1 - 2 s + 2 s^2))
        grid = np.linspace(0.0, s, 20_001)
        return float(np.trapezoid(2.0 / (math.pi * (1.0 - 2.0 * grid + 2.0 * grid**2)), grid))
    u = np.linspace(0.0, 1.0, 200_001)  # mode: f(u) falls from 1 to 0
    return float(np.mean(1.0 - u - 1.29 * (np.cos(np.pi / 2 * u) ** 2 - 1.0 + u) < s))


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "sigmoid", "mode", "cosmap", "beta"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_noise_levels_are_distributed_as_the_paper_says(sampling: str, shift: float) -> None:
    o = FlowObjective(chosen(sampling), constant_shift(shift))
    found = np.sort(o.timesteps(rng(range(40_000)), SHAPE).numpy())
    assert found[0] > 0.0
    assert found[-1] <= 1.0
    unshifted = found / (shift - (shift - 1.0) * found)
    for s in np.linspace(0.05, 0.95, 19):
        assert abs(np.searchsorted(unshifted, s) / 40_000 - below(sampling, float(s))) < 0.012  # Kolmogorov at 1e-5


def test_fluxs_shift_follows_the_resolution() -> None:
    shift = resolution_shift()
    assert shift(256) == pytest.approx(math.exp(0.5))
    assert shift(4096) == pytest.approx(math.exp(1.15))  # 1024 x 1024
    assert shift(1024) == pytest.approx(1.878, abs=1e-3)  # 512 x 512
    o = FlowObjective(Uniform(), shift)
    small, large = (o.timesteps(rng(range(5)), (side, side, 16)).numpy() for side in (32, 128))
    np.testing.assert_allclose(large, shifted(small / (shift(256) - (shift(256) - 1) * small), shift(4096)), rtol=1e-5)


def test_a_sample_gets_the_same_draws_in_any_batch() -> None:
    o = FlowObjective(kinds=Noise.of(LossSection(offset_noise=0.1)))
    whole_t, whole = (
        o.timesteps(rng(range(4)), SHAPE).numpy(),
        o.noise(rng(range(4)), blank(4)).numpy(),
    )
    for i in range(4):
        assert o.timesteps(rng([i]), SHAPE).numpy() == whole_t[i]
        np.testing.assert_array_equal(o.noise(rng([i]), blank(1)).numpy()[0], whole[i])
    assert not np.array_equal(o.timesteps(rng(range(4), 1), SHAPE).numpy(), whole_t)


def test_no_noise_level_outweighs_a_thousandth() -> None:
    """diffusers' examples draw from a thousand levels, the least of which weighs a million; s here may be any."""
    s = np.array([6.6e-7, 1e-4, 1e-3, 2e-3], np.float32)
    np.testing.assert_allclose(SigmaSqrt().of_flow(s), [1e6, 1e6, 1e6, 2.5e5], rtol=1e-5)


@pytest.mark.parametrize("mean", [-1.0, 1.0])
def test_a_mean_above_zero_is_more_noise(mean: float) -> None:
    """diffusers' logit_mean indexes a table that begins with pure noise: there it is the other way round."""
    rng = Rng(np, 0, 0, np.arange(4096))
    drawn = FlowObjective(LogitNormal(logit_mean=mean)).timesteps(rng, (8, 8, 16)).numpy()
    assert (np.median(drawn) > 0.5) == (mean > 0)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_velocity_is_the_slope_of_what_the_denoiser_sees(weighting: str) -> None:
    o = FlowObjective(weighting=WEIGHTINGS[weighting]())
    x0 = tensor(np.random.default_rng(0).standard_normal((3, *SHAPE)))
    noise, t = o.noise(rng(range(3)), x0), tensor(np.array([0.2, 0.5, 0.7]))
    h = 1e-3
    slope = (o.noised(x0, noise, t + h) - o.noised(x0, noise, t - h)) * (0.5 / h)
    np.testing.assert_allclose(slope.numpy(), o.target(x0, noise, t).numpy(), atol=1e-4)
    assert o.losses(o.target(x0, noise, t), x0, noise, t).mean().item() == 0.0
    one_off = o.losses(o.target(x0, noise, t) + 1.0, x0, noise, t).numpy()
    s = t.numpy()
    weights = {"none": s**0, "sigma_sqrt": s**-2, "cosmap": 2 / (np.pi * ((1 - s) ** 2 + s**2))}[weighting]
    np.testing.assert_allclose(one_off, weights, rtol=1e-5)


def test_a_wrong_prediction_costs_more_the_more_wrong_it_is() -> None:
    o = FlowObjective()
    x0, noise = (tensor(np.random.default_rng(i).standard_normal((2, *SHAPE)).astype(np.float32)) for i in range(2))
    t = tensor(np.array([0.1, 0.9], np.float32))
    costs = [o.losses(o.target(x0, noise, t) + d, x0, noise, t).mean().item() for d in (0.0, 0.5, 1.0)]
    assert costs == pytest.approx([0.0, 0.25, 1.0])


@pytest.mark.parametrize("sigmas", [static_sigmas(7, 3.0), dynamic_sigmas(4, 2.0)])
def test_the_way_back_along_the_true_velocity_ends_at_the_image(sigmas: np.ndarray) -> None:
    x0, noise = (tensor(np.random.default_rng(i).standard_normal((2, *SHAPE)).astype(np.float32)) for i in range(2))
    seen = []

    def denoise(x: Tensor, s: Tensor, cond: object) -> Tensor:
        seen.append(float(s.numpy()[0]))
        return noise - x0

    found = Euler().sample(denoise, noise, None, FlowPath(sigmas), lambda i: noise)
    np.testing.assert_allclose(found.numpy(), x0.numpy(), atol=1e-5)
    np.testing.assert_allclose(seen, sigmas[:-1], rtol=1e-6)
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert (np.diff(sigmas) < 0).all()


def test_steps_that_make_no_sense_are_refused() -> None:
    for steps in (0, 1001):
        with pytest.raises(ConfigError, match="expected 1 to 1000"):
            static_sigmas(steps, 3.0)
        with pytest.raises(ConfigError, match="expected 1 to 1000"):
            dynamic_sigmas(steps, 1.0)


@pytest.mark.parametrize("sampling", ["logit_normal", "beta"])
def test_the_span_holds_all_levels_after_the_shift(sampling: str) -> None:
    whole, part = (
        FlowObjective(chosen(sampling), constant_shift(3.0), span=span).timesteps(rng(range(2000)), SHAPE).numpy()
        for span in ((0, 1000), (200, 700))
    )
    np.testing.assert_allclose(part, 0.2 + 0.5 * whole, rtol=1e-6)


def test_listed_timesteps_are_told_as_they_are() -> None:
    sampling = TIMESTEP_SAMPLINGS["list"](timestep_list=(999, 3, 3, 290))
    found = FlowObjective(sampling, constant_shift(3.0)).timesteps(rng(range(8000)), SHAPE).numpy()
    levels, counts = np.unique(found, return_counts=True)
    np.testing.assert_array_equal(levels, np.array([3, 290, 999], np.float32) / np.float32(1000))
    np.testing.assert_allclose(counts / 8000, [0.5, 0.25, 0.25], atol=0.03)
