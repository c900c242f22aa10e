"""Kinds of noise against sd-scripts' formulas in PyTorch, on the numbers that were drawn here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.config.schema import LossSection
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.noise.immiscible import nearest_first
from flame_train.diffusion.noise.pyramid import enlarged
from flame_train.diffusion.random_streams import Stream
from flame_train.engine import Tensor, tensor
from flame_train.engine.random import Rng

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

SHAPE = (12, 20, 4)


def rng(samples: Any = range(3)) -> Rng:
    return Rng(np, 7, 5, np.asarray(samples))


def latents(batch: int = 3) -> Tensor:
    return tensor(np.random.default_rng(1).standard_normal((batch, *SHAPE)).astype(np.float32) + np.float32(0.5))


def made(**keys: Any) -> Noise:
    return Noise.of(LossSection(**keys))


def drawn(**keys: Any) -> Any:
    return torch.tensor(made(**keys).drawn(rng(), latents()).numpy())


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("adaptive", [0.0, 0.3, -0.3])
def test_offset(random: bool, adaptive: float) -> None:
    """sd-scripts' `apply_noise_offset`, but for a strength of its own for each sample."""
    strength = torch.full((3, 1, 1, 1), 0.2)
    if random:
        strength = strength * torch.tensor(rng().uniform(Stream.OFFSET_STRENGTH)).view(3, 1, 1, 1)
    if adaptive:
        mean = torch.abs(torch.tensor(latents().numpy()).mean(dim=(1, 2), keepdim=True))
        strength = torch.clamp(strength + adaptive * mean, 0.0, None)
    expected = drawn() + strength * torch.tensor(rng().normal(Stream.OFFSET, (1, 1, SHAPE[-1])))
    found = drawn(offset_noise=0.2, offset_noise_random=random, offset_noise_adaptive=adaptive)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("high", "wide"), [(6, 10), (5, 3), (1, 7), (1, 1), (2, 10)])
def test_enlarging_is_torchs(high: int, wide: int) -> None:
    grid = np.random.default_rng(0).standard_normal((2, 6, 10, 4)).astype(np.float32)
    counts = [np.full(2, n, np.float32) for n in (high, wide)]
    found = enlarged(np, Tensor(grid), SHAPE[:2], *counts).numpy()
    up = torch.nn.Upsample(size=SHAPE[:2], mode="bilinear")
    expected = up(torch.tensor(grid[:, :high, :wide]).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("levels", [1, 2, 6])
def test_pyramid(levels: int) -> None:
    """sd-scripts' `pyramid_noise_like`, a sample at a time, its random scales and grids being those drawn here."""
    h, w, c = SHAPE
    sizes = [(max(1, h >> i), max(1, w >> i)) for i in range(levels)]
    numbers = rng().normal(Stream.PYRAMID, (sum(a * b for a, b in sizes), c))
    scales = 2.0 + 2.0 * rng().uniform(Stream.PYRAMID_SCALE, (levels,))
    plain, found = drawn(), drawn(pyramid_noise=levels, pyramid_noise_discount=0.6)
    for sample in range(3):
        noise, start = plain[sample : sample + 1].permute(0, 3, 1, 2), 0
        up = torch.nn.Upsample(size=(h, w), mode="bilinear")
        for i, (a, b) in enumerate(sizes):
            grid = numbers[sample, start : start + a * b].reshape(a, b, c)
            start += a * b
            r = float(scales[sample, i])
            hn, wn = max(1, int(h / (r**i))), max(1, int(w / (r**i)))
            noise = noise + up(torch.tensor(grid[:hn, :wn]).permute(2, 0, 1)[None]) * 0.6**i
            if hn == 1 or wn == 1:
                break
        expected = (noise / noise.std()).permute(0, 2, 3, 1)[0]
        torch.testing.assert_close(found[sample], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("random", [False, True])
def test_input_perturbation(random: bool) -> None:
    noise = made(input_perturbation=0.1, input_perturbation_random=random)
    target = noise.drawn(rng(), latents())
    np.testing.assert_array_equal(target.numpy(), drawn().numpy(), err_msg="what is asked for stays")
    strength = 0.1 * (rng().uniform(Stream.PERTURBATION_STRENGTH).reshape(3, 1, 1, 1) if random else 1.0)
    expected = target.numpy() + strength * rng().normal(Stream.PERTURBATION, SHAPE)
    np.testing.assert_allclose(noise.mixed(rng(), target).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_nearest_pairs_come_first() -> None:
    for size in (1, 2, 5, 64):
        distances = np.random.default_rng(size).random((size, size)).astype(np.float32)
        left = {(i, j) for i in range(size) for j in range(size)}
        expected = {}
        while left:
            row, column = min(left, key=lambda pair: (distances[pair], pair))
            expected[row] = column
            left = {(i, j) for i, j in left if i != row and j != column}
        assert nearest_first(np, distances).tolist() == [expected[i] for i in range(size)]
    assert nearest_first(np, np.zeros((3, 3), np.float32)).tolist() == [0, 1, 2]


def test_immiscible_noise_is_the_same_noise_nearer_to_its_images() -> None:
    samples, images = range(32), latents(32)
    plain = made().drawn(rng(samples), images).numpy()
    paired = made(immiscible_noise=True).drawn(rng(samples), images).numpy()
    assert sorted(map(bytes, plain)) == sorted(map(bytes, paired))

    def far(noise: np.ndarray) -> float:
        return float(((images.numpy() - noise) ** 2).sum((1, 2, 3)).mean())

    from scipy.optimize import linear_sum_assignment

    cost = ((images.numpy()[:, None] - plain[None]) ** 2).sum((2, 3, 4))
    best = cost[linear_sum_assignment(cost)].mean()
    assert best <= far(paired) < far(plain)
    assert far(plain) - far(paired) > 0.5 * (far(plain) - best), "most of what the paper's assignment gains"


@pytest.mark.parametrize(
    "keys", [{"offset_noise": 0.1, "offset_noise_random": True}, {"pyramid_noise": 5}, {"input_perturbation": 0.2}]
)
def test_a_sample_gets_the_same_noise_in_any_batch(keys: dict[str, Any]) -> None:
    noise, x = made(**keys), latents()
    whole = noise.mixed(rng(), noise.drawn(rng(), x)).numpy()
    for i in range(3):
        alone = noise.mixed(rng([i]), noise.drawn(rng([i]), x[i : i + 1])).numpy()
        np.testing.assert_allclose(alone[0], whole[i], rtol=1e-6, atol=1e-6)
