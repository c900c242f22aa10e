"""Noise schedules by their definition; parity is in tests/parity."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.diffusion.noise_schedule import NoiseSchedule
from flame_train.errors import ConfigError

SDXL = NoiseSchedule.scaled_linear()


def test_scaled_linear_is_the_product_of_its_alphas() -> None:
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    np.testing.assert_allclose(SDXL.alphas_cumprod, np.cumprod(1 - betas), rtol=2e-6)
    assert SDXL.steps == 1000
    np.testing.assert_allclose(SDXL.snr, SDXL.sigmas**-2.0)


def test_zero_terminal_snr_keeps_the_first_and_empties_the_last() -> None:
    fixed = SDXL.zero_terminal_snr()
    assert fixed.alphas_cumprod[0] == pytest.approx(SDXL.alphas_cumprod[0], rel=1e-12)
    assert fixed.alphas_cumprod[-1] == 0.0
    assert (np.diff(fixed.alphas_cumprod) < 0).all()
    assert fixed.snr[-1] == 0.0
    assert np.isinf(fixed.sigmas[-1])


def test_sdxl_timesteps() -> None:
    assert SDXL.timesteps(4).tolist() == [751, 501, 251, 1]
    assert SDXL.timesteps(4, "trailing").tolist() == [999, 749, 499, 249]
    assert SDXL.timesteps(1000, "trailing").tolist() == list(range(999, -1, -1))
    assert SDXL.timesteps(1000, "leading", offset=0).tolist() == list(range(999, -1, -1))


@pytest.mark.parametrize(
    ("count", "spacing"), [(1000, "leading"), (1001, "trailing"), (1001, "leading"), (0, "leading")]
)
def test_timesteps_that_do_not_fit_are_refused(count: int, spacing: str) -> None:
    with pytest.raises(ConfigError, match=r"sample\.steps"):
        SDXL.timesteps(count, spacing)
