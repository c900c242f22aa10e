"""The autoencoder's conventions: sizes, scale, bounds. Its numbers are in tests/parity."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import no_grad, tensor
from flame_train.networks.vae.vae import Vae, VaeArch, sample_latents


@pytest.fixture
def vae():
    model = Vae(VaeArch.tiny(8))
    model.init(np.random.default_rng(0))
    return model


@pytest.fixture
def pixels():
    return tensor(np.random.default_rng(1).uniform(-1, 1, (2, 16, 24, 3)).astype(np.float32))


def test_sizes(vae, pixels):
    with no_grad():
        mean, logvar = vae.encode_moments(pixels)
        assert mean.shape == logvar.shape == (2, 2, 3, 4)
        assert vae.decode(mean).shape == (2, 16, 24, 3)
    assert vae.arch.downscale == 8


def test_log_variance_is_bounded(vae, pixels):
    """As the reference has it: [-30, 20], so that a standard deviation neither vanishes nor overflows."""
    vae.quant_conv.bias.data[4:] = [1e4, -1e4, 1e4, -1e4]
    _, logvar = vae.encode_moments(pixels)
    assert set(np.unique(logvar.numpy()[..., ::2])) == {20.0}
    assert set(np.unique(logvar.numpy()[..., 1::2])) == {-30.0}


def test_latents_are_scaled_samples(vae):
    rng = np.random.default_rng(2)
    mean, logvar, noise = (rng.standard_normal((1, 2, 2, 4)) for _ in range(3))
    found = sample_latents(vae.arch, (tensor(mean), tensor(logvar)), tensor(noise))
    np.testing.assert_allclose(found.numpy(), 0.13025 * (mean + np.sqrt(np.exp(logvar)) * noise))


def test_decoding_undoes_the_scale(vae):
    """The decoder sees the mean itself, whatever the scaling factor is."""
    mean = np.random.default_rng(3).standard_normal((1, 2, 2, 4)).astype(np.float32)
    direct = vae.decoder(vae.post_quant_conv(tensor(mean))).numpy()
    np.testing.assert_allclose(vae.decode(tensor(mean * np.float32(0.13025))).numpy(), direct, rtol=1e-4, atol=1e-5)
