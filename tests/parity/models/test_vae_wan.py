"""Wan 2.2's autoencoder against diffusers' AutoencoderKLWan: names, and moments and pixels of stills and films."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.errors import ModelFileError, ShapeError
from flame_train.io.resolve import native_shapes, resolve
from flame_train.models.wan.names import PUBLISHED_VAE, TINY_VAE
from flame_train.networks.files.identify import identify
from flame_train.networks.files.stated import Stated
from flame_train.networks.vae.names import nested_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from tests.parity.models.test_vae_qwenimage import wan_names
from tests.parity.models.vae_pairs import pair_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

VAE = nested_vae_component(films=True)


def twin_of(arch):
    return diffusers.AutoencoderKLWan(
        base_dim=arch.channels,
        decoder_base_dim=arch.decoder_channels,
        z_dim=arch.latent_channels,
        num_res_blocks=arch.num_res_blocks,
        temperal_downsample=[False, True, True],
        latents_mean=list(arch.latents_mean),
        latents_std=list(arch.latents_std),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )


@pytest.fixture(scope="module")
def pair():
    """A small random model of diffusers, every weight away from its neutral value, and ours with its weights."""
    return pair_of(VAE, TINY_VAE, lambda: twin_of(TINY_VAE))


def film(x):
    """Channels first, as diffusers takes a film."""
    return torch.from_numpy(x.astype(np.float64)).permute(0, 4, 1, 2, 3)


def test_names_and_shapes_of_the_published_model():
    """Every tensor of either layout has one place, every weight one source."""
    with torch.device("meta"):
        folder = {name: tuple(t.shape) for name, t in twin_of(PUBLISHED_VAE).state_dict().items()}
    assert sum(int(np.prod(shape)) for shape in folder.values()) == 704_688_668
    in_wan = dict(zip(wan_names(folder, 2), folder.values(), strict=True))
    for names, layout in ((folder, "diffusers"), (in_wan, "single-file")):
        found = resolve((VAE,), names, only="vae")
        native = native_shapes(found.sources["vae"], names)
        assert native == Vae(PUBLISHED_VAE).shapes()
        assert VaeArch.from_shapes(native, PUBLISHED_VAE) == PUBLISHED_VAE
        used = Counter(name for source in found.sources["vae"].values() for name in source.names)
        assert {name for name, times in used.items() if times == 3} == {name for name in names if ".to_qkv." in name}
        assert set(used) == set(names)
        assert (found.unknown, found.ignored) == ((), ())
        known = identify(names)
        assert (known.kind, known.family, known.layout) == ("vae", "wan", layout)


@pytest.mark.parametrize("frames", [1, 9])
def test_moments(pair, off, frames):
    model, twin = pair
    pixels = np.random.default_rng(1).uniform(-1, 1, (2, frames, 32, 64, 3)).astype(np.float32)
    mean, logvar = model.encode_moments(tensor(pixels))
    assert mean.shape == (2, 1 + frames // 4, 2, 4, 48)
    with torch.no_grad():
        posterior = twin.encode(film(pixels)).latent_dist
    center, spread = np.array(twin.config.latents_mean), np.array(twin.config.latents_std)
    expected = posterior.mean.permute(0, 2, 3, 4, 1).numpy(), posterior.logvar.permute(0, 2, 3, 4, 1).numpy()
    assert off(mean, (expected[0] - center) / spread) < 1e-5
    assert off(logvar, expected[1] - 2 * np.log(spread)) < 1e-5


@pytest.mark.parametrize("frames", [1, 4])
def test_pixels(pair, off, frames):
    """Diffusers' are held within [-1, 1], so ours are too for the comparison."""
    model, twin = pair
    latents = np.random.default_rng(2).standard_normal((2, frames, 2, 3, 48)).astype(np.float32)
    center, spread = np.array(twin.config.latents_mean), np.array(twin.config.latents_std)
    with torch.no_grad():
        expected = twin.decode(film(latents * spread + center)).sample.permute(0, 2, 3, 4, 1).numpy()
    assert expected.shape == (2, 4 * frames - 3, 32, 48, 3)
    assert float((np.abs(expected) < 1).mean()) > 0.5
    assert off(np.clip(model.decode(tensor(latents)).numpy(), -1, 1), expected) < 1e-5


def test_a_still_is_a_film_of_one_frame(pair):
    """The same numbers, with an axis of frames and without; a film of another length is refused."""
    model, _ = pair
    pixels = tensor(np.random.default_rng(3).uniform(-1, 1, (1, 1, 32, 32, 3)).astype(np.float32))
    still, alone = model.encode_moments(pixels), model.encode_moments(pixels[:, 0])
    for one, other in zip(still, alone, strict=True):
        np.testing.assert_array_equal(one.numpy()[:, 0], other.numpy())
    np.testing.assert_array_equal(model.decode(still[0]).numpy()[:, 0], model.decode(alone[0]).numpy())
    with pytest.raises(ShapeError, match="expected a film of 1 frame and a multiple of 4, got 3 frames"):
        model.encode_moments(tensor(np.zeros((1, 3, 32, 32, 3), np.float32)))


def test_a_config_that_says_something_else_is_refused(tmp_path):
    stated = {"is_residual": False, "in_channels": 3, "temperal_downsample": [True] * 3}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(stated))
    with pytest.raises(ModelFileError) as refused:
        VaeArch.from_shapes(Vae(TINY_VAE).shapes(), PUBLISHED_VAE, Stated.read(file))
    for key in stated:
        assert f"{key} is" in str(refused.value)
