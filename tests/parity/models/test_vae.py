"""The autoencoder against diffusers' AutoencoderKL."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import Tensor, tensor
from flame_train.models.keys.sdxl_vae import vae_from_diffusers
from flame_train.models.vae import Vae, VaeArch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

ARCH = VaeArch(channels=16, num_res_blocks=2, groups=4)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(Vae(ARCH), dtype)
    stages = len(ARCH.channel_mult)
    twin = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * stages,
        up_block_types=["UpDecoderBlock2D"] * stages,
        block_out_channels=[ARCH.channels * m for m in ARCH.channel_mult],
        layers_per_block=ARCH.num_res_blocks,
        latent_channels=ARCH.latent_channels,
        norm_num_groups=ARCH.groups,
    )
    return model, fill(model, twin, vae_from_diffusers(stages).inverse)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def channels_first(array):
    return torch.from_numpy(array.astype(np.float64)).permute(0, 3, 1, 2)


def channels_last(array):
    return array.detach().permute(0, 2, 3, 1)


@pytest.mark.parametrize("size", [(24, 16), (32, 40)])
def test_moments(pair, rng, dtype, bound, off, size):
    model, twin = pair
    pixels = rng.uniform(-1, 1, (2, *size, 3)).astype(dtype)
    mean, logvar = model.encode_moments(tensor(pixels))
    posterior = twin.encode(channels_first(pixels)).latent_dist
    assert off(mean, channels_last(posterior.mean)) < bound
    assert off(logvar, channels_last(posterior.logvar)) < bound


def test_sampled_latents(pair, rng, dtype, bound, off):
    model, twin = pair
    pixels = rng.uniform(-1, 1, (1, 16, 16, 3)).astype(dtype)
    noise = rng.standard_normal((1, 2, 2, 4)).astype(dtype)
    posterior = twin.encode(channels_first(pixels)).latent_dist
    expected = (posterior.mean + posterior.std * channels_first(noise)) * 0.13025
    found = model.sample_latents(model.encode_moments(tensor(pixels)), tensor(noise))
    assert off(found, channels_last(expected)) < bound


def test_decoded_pixels(pair, rng, dtype, bound, off):
    model, twin = pair
    latents = rng.standard_normal((2, 3, 5, 4)).astype(dtype)
    expected = twin.decode(channels_first(latents) / 0.13025).sample
    assert off(model.decode(tensor(latents)), channels_last(expected)) < bound


def test_gradient_through_the_decoder(pair, rng, dtype, bound, off):
    model, twin = pair
    values = rng.standard_normal((1, 2, 3, 4)).astype(dtype)
    weight = rng.standard_normal((1, 16, 24, 3)).astype(dtype)
    here, there = Tensor(values, requires_grad=True), torch.from_numpy(values.astype(np.float64)).requires_grad_()
    (model.decode(here) * tensor(weight)).sum().backward()
    pixels = twin.decode(there.permute(0, 3, 1, 2) / 0.13025).sample.permute(0, 2, 3, 1)
    (pixels * torch.from_numpy(weight)).sum().backward()
    assert off(here.grad, there.grad) < bound
