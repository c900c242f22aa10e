"""Qwen-Image's autoencoder against diffusers' AutoencoderKLQwenImage: names, moments, pixels, and both by tiles."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.errors import ModelFileError
from flame_train.io.resolve import native_shapes, resolve
from flame_train.networks.files.identify import identify
from flame_train.networks.files.stated import Stated
from flame_train.networks.vae.autoencoder import VaeTiles
from flame_train.networks.vae.names import qwen_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from tests.parity.models.vae_pairs import ours_of, pair_of

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

WAN = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "conv_in": "conv1",
    "conv_out": "head.2",
    "norm_out": "head.0",
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
    "upsamplers.0.": "",
}


def twin_of(arch, **others):
    return diffusers.AutoencoderKLQwenImage(
        base_dim=arch.channels, num_res_blocks=arch.num_res_blocks, z_dim=arch.latent_channels, **others
    )


def wan_names(names, blocks):
    """Diffusers' names as Wan 2.1's file has them, written apart from the tables that are tested."""
    for name in names:
        side, *path = name.split(".")
        if side in ("quant_conv", "post_quant_conv"):
            yield f"{WAN[side]}.{path[0]}"
            continue
        match path:
            case ["down_blocks", n, *rest]:
                begin = ["downsamples", n]
            case ["up_blocks", n, "resnets", j, *rest]:
                begin = ["upsamples", str(int(n) * (blocks + 2) + int(j))]
            case ["up_blocks", n, "upsamplers", "0", *rest]:
                begin = ["upsamples", str(int(n) * (blocks + 2) + blocks + 1)]
            case ["mid_block", "resnets", j, *rest]:
                begin = ["middle", str(2 * int(j))]
            case ["mid_block", "attentions", "0", *rest]:
                yield ".".join([side, "middle", "1", *rest])
                continue
            case rest:
                begin = []
        yield ".".join([side, *begin, WAN.get(rest[0], rest[0]), *rest[1:]])


@pytest.fixture(scope="module")
def pair():
    """A small random model of diffusers, every weight away from its neutral value, and ours with its weights."""
    arch = VaeArch.tiny_qwen_image()
    return pair_of(qwen_vae_component(), arch, lambda: twin_of(arch), "float64")


def first(array):
    return torch.from_numpy(array.astype(np.float64)).permute(0, 3, 1, 2).unsqueeze(2)


def last(array):
    return array.detach().squeeze(2).permute(0, 2, 3, 1).numpy()


def stats(arch):
    return (np.array(values) for values in (arch.latents_mean, arch.latents_std))


def test_names_and_shapes_of_the_published_model():
    """Every tensor of either layout has one place, every weight one source; only convolutions over time are left."""
    arch = VaeArch.qwen_image()
    with torch.device("meta"):
        folder = {name: tuple(t.shape) for name, t in twin_of(arch).state_dict().items()}
    single = dict(zip(wan_names(folder, 2), folder.values(), strict=True))
    for names, layout in ((folder, "diffusers"), (single, "single-file")):
        found = resolve((qwen_vae_component(),), names, only="vae")
        native = native_shapes(found.sources["vae"], names)
        assert native == Vae(arch).shapes()
        assert VaeArch.from_shapes(native, VaeArch.qwen_image()) == arch
        used = Counter(name for source in found.sources["vae"].values() for name in source.names)
        joint = {name for name in names if ".to_qkv." in name}
        assert {name for name, times in used.items() if times == 3} == joint
        assert set(used.values()) == {1, 3}
        assert set(used) | set(found.ignored) == set(names)
        assert found.unknown == ()
        assert all(".time_conv." in name for name in found.ignored)
        assert len(found.ignored) == 8
        known = identify(names)
        assert (known.kind, known.family, known.layout) == ("vae", "qwen-wan", layout)


def test_names_of_wan_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers as convert

    with torch.device("meta"):
        folder = twin_of(VaeArch.qwen_image()).state_dict()
    converted = convert(dict(zip(wan_names(folder, 2), folder, strict=True)))
    assert all(name == original for name, original in converted.items())


def test_both_layouts_hold_the_same_weights(pair):
    ours, twin = pair
    stored = twin.state_dict()
    arrays = (t.numpy() for t in stored.values())
    renamed = dict(zip(wan_names(stored, ours.arch.num_res_blocks), arrays, strict=True))
    again = ours_of(qwen_vae_component(), ours.arch, renamed, "float64")
    for (name, here), (_, there) in zip(ours.weights(), again.weights(), strict=True):
        np.testing.assert_array_equal(here.numpy(), there.numpy(), err_msg=name)


@pytest.fixture(params=["float32", "float64"])
def in_precision(request, pair):
    """The pair with our weights in this precision, which its inputs have too, and the error allowed."""
    ours, twin = pair
    model = Vae(ours.arch)
    model.init(np.random.default_rng(0), request.param)
    for (_, weight), (_, value) in zip(model.weights(), ours.weights(), strict=True):
        weight.data[...] = value.numpy()
    return model, twin, request.param, {"float32": 1e-5, "float64": 1e-9}[request.param]


@pytest.mark.parametrize("size", [(24, 16), (32, 40)])
def test_moments(in_precision, off, size):
    model, twin, dtype, bound = in_precision
    pixels = np.random.default_rng(1).uniform(-1, 1, (2, *size, 3)).astype(dtype)
    mean, logvar = model.encode_moments(tensor(pixels))
    with torch.no_grad():
        posterior = twin.encode(first(pixels)).latent_dist
    center, spread = stats(model.arch)
    assert off(mean, (last(posterior.mean) - center) / spread) < bound
    assert off(logvar, last(posterior.logvar) - 2 * np.log(spread)) < bound


def test_pixels(in_precision, off):
    """Diffusers' are held within [-1, 1], so ours are too for the comparison; it repeats pixels in fp32 whatever."""
    model, twin, dtype, _ = in_precision
    latents = np.random.default_rng(2).standard_normal((2, 3, 5, 16)).astype(dtype)
    center, spread = stats(model.arch)
    with torch.no_grad():
        expected = last(twin.decode(first(latents * spread + center)).sample)
    assert float((np.abs(expected) < 1).mean()) > 0.5
    assert (
        off(np.clip(model.decode(tensor(latents)).numpy(), -1, 1), expected) < {"float32": 1e-5, "float64": 1e-6}[dtype]
    )


def test_by_tiles(pair, off):
    """Tiles that overlap in both directions, the last ones smaller; where an image fits one tile it is whole."""
    model, twin = pair
    twin.enable_tiling(32, 32, 24, 24)
    rng = np.random.default_rng(3)
    pixels, latents = rng.uniform(-1, 1, (1, 56, 40, 3)), rng.standard_normal((1, 7, 5, 16))
    center, spread = stats(model.arch)
    try:
        with torch.no_grad():
            posterior = twin.encode(first(pixels)).latent_dist
            decoded = last(twin.decode(first(latents * spread + center)).sample)
    finally:
        twin.use_tiling = False
    mean, logvar = VaeTiles(model, 32).encode_moments(tensor(pixels))
    assert off(mean, (last(posterior.mean) - center) / spread) < 1e-9
    assert off(logvar, last(posterior.logvar) - 2 * np.log(spread)) < 1e-9
    found = VaeTiles(model, 32).decode(tensor(latents))
    assert off(np.clip(found.numpy(), -1, 1), np.clip(decoded, -1, 1)) < 1e-6
    small = tensor(latents[:, :3, :4])
    np.testing.assert_array_equal(VaeTiles(model, 32).decode(small).numpy(), model.decode(small).numpy())


def test_what_a_folder_states(tmp_path):
    file = tmp_path / "config.json"
    native, usual = Vae(VaeArch.tiny_qwen_image()).shapes(), VaeArch.qwen_image()

    def read(**stated):
        file.write_text(json.dumps(stated))
        return VaeArch.from_shapes(native, usual, Stated.read(file))

    other = [float(n) for n in range(1, 17)]
    assert read(latents_mean=other).latents_mean == tuple(other)
    with pytest.raises(ModelFileError, match="latents_std: expected 16 numbers"):
        read(latents_std=[1.0])
    with pytest.raises(ModelFileError, match="input_channels is 4, expected 3"):
        read(input_channels=4)
