"""Qwen-Image 2.1's autoencoder against diffusers' AutoencoderKLQwenImage21: names, moments and pixels."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.errors import ModelFileError
from flame_train.io.resolve import native_shapes, resolve
from flame_train.models.qwenimage.names import PUBLISHED_VAE, TINY_VAE
from flame_train.networks.files.identify import identify
from flame_train.networks.files.stated import Stated
from flame_train.networks.vae.names import nested_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from tests.parity.models.test_vae_qwen import WAN, last
from tests.parity.models.vae_pairs import pair_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity


def twin_of(arch):
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=arch.channels, decoder_base_dim=arch.decoder_channels, num_res_blocks=arch.num_res_blocks
    )


def wan_names(names, blocks):
    """Diffusers' names as Wan 2.2's file has them, written apart from the tables that are tested."""
    for name in names:
        side, *path = name.split(".")
        if side in ("quant_conv", "post_quant_conv"):
            yield f"{WAN[side]}.{path[0]}"
            continue
        match path:
            case ["down_blocks", n, "resnets", j, *rest]:
                begin = ["downsamples", n, "downsamples", j]
            case ["down_blocks", n, "downsampler", *rest]:
                begin = ["downsamples", n, "downsamples", str(blocks)]
            case ["up_blocks", n, "resnets", j, *rest]:
                begin = ["upsamples", n, "upsamples", j]
            case ["up_blocks", n, "upsampler", *rest]:
                begin = ["upsamples", n, "upsamples", str(blocks + 1)]
            case ["mid_block", "resnets", j, *rest]:
                begin = ["middle", str(2 * int(j))]
            case ["mid_block", "attentions", "0", *rest]:
                yield ".".join([side, "middle", "1", *rest])
                continue
            case rest:
                begin = []
        yield ".".join([side, *begin, WAN.get(rest[0], rest[0]), *rest[1:]])


def in_wan(folder, blocks):
    """Wan 2.2's file of these tensors' names and shapes: its convolutions keep an axis of time, of one."""
    for wan, (name, shape) in zip(wan_names(folder, blocks), folder.items(), strict=True):
        flat = ".resample." in name or ".attentions." in name
        yield wan, shape if flat or len(shape) != 4 or "gamma" in name else (*shape[:2], 1, *shape[2:])


@pytest.fixture(scope="module")
def pair():
    """A small random model of diffusers, every weight away from its neutral value, and ours with its weights."""
    return pair_of(nested_vae_component(), TINY_VAE, lambda: twin_of(TINY_VAE))


def opaque(pixels):
    """As diffusers takes them: channels first, a frame, and an alpha of 1."""
    x = torch.from_numpy(pixels.astype(np.float64)).permute(0, 3, 1, 2)
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=1).unsqueeze(2)


def test_names_and_shapes_of_the_published_model():
    """Every tensor of either layout has one place, every weight one source; only convolutions over time are left."""
    with torch.device("meta"):
        folder = {name: tuple(t.shape) for name, t in twin_of(PUBLISHED_VAE).state_dict().items()}
    for names, layout in ((folder, "diffusers"), (dict(in_wan(folder, 2)), "single-file")):
        found = resolve((nested_vae_component(),), names, only="vae")
        native = native_shapes(found.sources["vae"], names)
        assert native == Vae(PUBLISHED_VAE).shapes()
        assert VaeArch.from_shapes(native, PUBLISHED_VAE) == PUBLISHED_VAE
        used = Counter(name for source in found.sources["vae"].values() for name in source.names)
        assert {name for name, times in used.items() if times == 3} == {name for name in names if ".to_qkv." in name}
        assert set(used.values()) == {1, 3}
        assert set(used) | set(found.ignored) == set(names)
        assert found.unknown == ()
        assert all(".time_conv." in name for name in found.ignored)
        assert len(found.ignored) == 12
        known = identify(names)
        assert (known.kind, known.family, known.layout) == ("vae", "qwenimage", layout)


def test_moments(pair, off):
    model, twin = pair
    pixels = np.random.default_rng(1).uniform(-1, 1, (2, 32, 64, 3)).astype(np.float32)
    mean, logvar = model.encode_moments(tensor(pixels))
    with torch.no_grad():
        posterior = twin.encode(opaque(pixels)).latent_dist
    center, spread = np.array(twin.config.latents_mean), np.array(twin.config.latents_std)
    assert off(mean, (last(posterior.mean) - center) / spread) < 1e-5
    assert off(logvar, last(posterior.logvar) - 2 * np.log(spread)) < 1e-5


def test_pixels(pair, off):
    """Diffusers' are held within [-1, 1], so ours are too for the comparison; alpha plays no part."""
    model, twin = pair
    latents = np.random.default_rng(2).standard_normal((2, 2, 3, 64)).astype(np.float32)
    center, spread = np.array(twin.config.latents_mean), np.array(twin.config.latents_std)
    stored = torch.from_numpy(latents * spread + center).permute(0, 3, 1, 2).unsqueeze(2)
    with torch.no_grad():
        expected = last(twin.decode(stored).sample)[..., :3]
    assert float((np.abs(expected) < 1).mean()) > 0.5
    assert off(np.clip(model.decode(tensor(latents)).numpy(), -1, 1), expected) < 1e-5


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"is_residual": False}, "is_residual is False, expected True"),
        ({"temperal_downsample": [True] * 4}, "temperal_downsample is"),
        ({"in_channels": 3}, "in_channels is 3, expected 4"),
        ({"patch_size": 2}, "patch_size is 2, expected None"),
        ({"latents_mean": [0.0]}, "latents_mean: expected 64 numbers"),
    ],
)
def test_a_config_that_says_something_else_is_refused(tmp_path, stated, words):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"patch_size": None, "is_residual": True} | stated))
    with pytest.raises(ModelFileError, match=words):
        VaeArch.from_shapes(Vae(TINY_VAE).shapes(), PUBLISHED_VAE, Stated.read(file))
