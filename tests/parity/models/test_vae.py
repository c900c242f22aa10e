"""The autoencoder against diffusers' AutoencoderKL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.engine import Tensor, tensor
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch, sample_latents

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

SMALL = {"channels": 16, "num_res_blocks": 2, "groups": 4}
ARCHS = {"4 channels": replace(VaeArch.sdxl(), **SMALL), "16 channels": replace(VaeArch.flux(), **SMALL)}


@pytest.fixture(params=ARCHS)
def arch(request):
    return ARCHS[request.param]


@pytest.fixture
def pair(dtype, fill, scrambled, arch):
    model = scrambled(Vae(arch), dtype)
    stages = len(arch.channel_mult)
    twin = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * stages,
        up_block_types=["UpDecoderBlock2D"] * stages,
        block_out_channels=[arch.channels * m for m in arch.channel_mult],
        layers_per_block=arch.num_res_blocks,
        latent_channels=arch.latent_channels,
        norm_num_groups=arch.groups,
        use_quant_conv=arch.quant_convs,
        use_post_quant_conv=arch.quant_convs,
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


def test_sampled_latents(pair, rng, dtype, bound, off, arch):
    model, twin = pair
    pixels = rng.uniform(-1, 1, (1, 16, 16, 3)).astype(dtype)
    noise = rng.standard_normal((1, 2, 2, arch.latent_channels)).astype(dtype)
    posterior = twin.encode(channels_first(pixels)).latent_dist
    expected = (posterior.mean + posterior.std * channels_first(noise) - arch.shift_factor) * arch.scaling_factor
    found = sample_latents(arch, model.encode_moments(tensor(pixels)), tensor(noise))
    assert off(found, channels_last(expected)) < bound


def test_decoded_pixels(pair, rng, dtype, bound, off, arch):
    model, twin = pair
    latents = rng.standard_normal((2, 3, 5, arch.latent_channels)).astype(dtype)
    expected = twin.decode(channels_first(latents) / arch.scaling_factor + arch.shift_factor).sample
    assert off(model.decode(tensor(latents)), channels_last(expected)) < bound


def test_gradient_through_the_decoder(pair, rng, dtype, bound, off, arch):
    model, twin = pair
    values = rng.standard_normal((1, 2, 3, arch.latent_channels)).astype(dtype)
    weight = rng.standard_normal((1, 16, 24, 3)).astype(dtype)
    here, there = Tensor(values, requires_grad=True), torch.from_numpy(values.astype(np.float64)).requires_grad_()
    (model.decode(here) * tensor(weight)).sum().backward()
    z = there.permute(0, 3, 1, 2) / arch.scaling_factor + arch.shift_factor
    pixels = twin.decode(z).sample.permute(0, 2, 3, 1)
    (pixels * torch.from_numpy(weight)).sum().backward()
    assert off(here.grad, there.grad) < bound
