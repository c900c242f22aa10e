"""Loading small Flux networks from every kind of file they come in, and refusing what is not Flux."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.flux.names import FLUX_FILES, transformer_to_diffusers
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.networks.files.identify import identify
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from tests.keymaps import through

FP8 = ml_dtypes.float8_e4m3fn
CLIP = ClipArch(width=768, layers=1, heads=12, hidden=32, activation="quick_gelu", projection=None)
NETWORKS = {
    "transformer": Flux(FluxArch.tiny()),
    "vae": Vae(replace(VaeArch.flux(), channels=16, num_res_blocks=1, groups=4)),
    "text_encoder": ClipTextEncoder(replace(CLIP, vocabulary=60)),
    "text_encoder_2": T5Encoder(T5Arch.tiny(vocabulary=50)),
}
PREFIXES = {
    "transformer": "model.diffusion_model.",
    "vae": "vae.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.t5xxl.transformer.",
}


@pytest.fixture(scope="module")
def arrays():
    """Random weights that fp8 can hold, in fp16, by component."""
    found = {}
    for name, network in NETWORKS.items():
        network.init(np.random.default_rng(0), "float32")
        found[name] = {n: w.numpy().astype(FP8).astype(np.float16) for n, w in network.weights()}
    return found


def same(model, arrays, dtype="float32"):
    for name, weight in model.weights():
        assert weight.dtype.name == dtype
        np.testing.assert_array_equal(weight.numpy().astype(np.float32), arrays[name].astype(np.float32), err_msg=name)


@pytest.mark.parametrize("kind", ["one file", "folder"])
def test_a_whole_model(arrays, tmp_path, kind):
    if kind == "one file":
        path = tmp_path / "flux.safetensors"
        tensors = {PREFIXES[part] + name: x for part, found in arrays.items() for name, x in found.items()}
        save_file(path, tensors | {"text_encoders.clip_l.logit_scale": np.zeros((), np.float16)})
    else:
        path = tmp_path
        stages = len(NETWORKS["vae"].arch.channel_mult)
        tables = {"transformer": transformer_to_diffusers(), "vae": vae_from_diffusers(stages).inverse}
        for part, found in arrays.items():
            (path / part).mkdir()
            tensors = through(tables[part], found) if part in tables else found
            save_file(path / part / "model.safetensors", tensors)
        (path / "model_index.json").write_text("{}")
    assert FLUX_FILES.all_parts(path, "transformer").keys() == set(NETWORKS)
    for part, network in NETWORKS.items():
        model = FLUX_FILES.load(path, part, device="cpu", dtype="bfloat16")
        assert (type(model), model.arch) == (type(network), network.arch)
        same(model, arrays[part], "bfloat16")
    for part, opened in FLUX_FILES.parts(path, ["transformer", "vae"]).items():
        assert (type(opened.network), opened.network.shapes()) == (type(NETWORKS[part]), NETWORKS[part].shapes())


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, FP8])
def test_a_transformer_alone(arrays, tmp_path, stored):
    path = tmp_path / "flux1-dev.safetensors"
    save_file(path, {name: x.astype(stored) for name, x in arrays["transformer"].items()})
    same(FLUX_FILES.load(path, "transformer", device="cpu", dtype="float32"), arrays["transformer"])


@pytest.mark.parametrize("which", [("qkv.weight", "linear1.weight"), ("weight",)], ids=["some", "every layer"])
def test_a_scaled_fp8_transformer(arrays, tmp_path, which):
    path = tmp_path / "flux1-dev-fp8-scaled.safetensors"
    linear = {name: x for name, x in arrays["transformer"].items() if name.endswith(which)}
    tensors = arrays["transformer"] | {name: (4 * x.astype(np.float32)).astype(FP8) for name, x in linear.items()}
    scales = {name.replace(".weight", ".scale_weight"): np.array(0.25, np.float32) for name in linear}
    save_file(path, tensors | scales | {"scaled_fp8": np.zeros(0, FP8)})
    expected = arrays["transformer"] | {name: tensors[name].astype(np.float32) / 4 for name in linear}
    same(FLUX_FILES.load(path, "transformer", device="cpu", dtype="float32"), expected)


def test_an_autoencoder_and_a_text_encoder_alone(arrays, tmp_path):
    save_file(tmp_path / "ae.safetensors", arrays["vae"])
    vae = FLUX_FILES.load(tmp_path / "ae.safetensors", "vae", device="cpu", dtype="float32")
    same(vae, arrays["vae"])
    assert (vae.arch.scaling_factor, vae.arch.shift_factor) == (0.3611, 0.1159)
    projection = {"text_projection.weight": np.zeros((768, 768), np.float16)}
    save_file(tmp_path / "clip_l.safetensors", arrays["text_encoder"] | projection)
    clip = FLUX_FILES.load(tmp_path / "clip_l.safetensors", "text_encoder", device="cpu", dtype="float32")
    same(clip, arrays["text_encoder"])
    assert clip.arch.projection is None


def test_a_whole_clip_is_read_for_its_text_half(arrays, tmp_path):
    """As openai/clip-vit-large-patch14 and what is derived from it are published."""
    of_images = ("vision_model.embeddings.class_embedding", "vision_model.encoder.layers.0.mlp.fc1.weight")
    others = (*of_images, "visual_projection.weight", "text_projection.weight", "logit_scale")
    save_file(
        tmp_path / "model.safetensors", arrays["text_encoder"] | {name: np.zeros((3, 3), np.float16) for name in others}
    )
    same(
        FLUX_FILES.load(tmp_path / "model.safetensors", "text_encoder", device="cpu", dtype="float32"),
        arrays["text_encoder"],
    )


def test_a_part_that_is_another_is_told_with_what_was_wanted(arrays, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(path, {"decoder.conv_in.weight": np.zeros((8, 4, 3, 3), np.float16)})
    for part, words in {"text_encoder": "CLIP-L of Flux.1", "vae": "vae of Flux.1", "transformer": "Flux.1"}.items():
        with pytest.raises(ModelFileError, match=f"expected {re.escape(words)}, found SD1, SD2 or SDXL, vae"):
            FLUX_FILES.load(path, part, device="cpu", dtype="float32")
    save_file(path, {"encoder.embed_tokens.weight": np.zeros((32128, 4096), FP8)})
    with pytest.raises(ModelFileError, match=r"holds no text_encoder; use .* This is: T5-XXL"):
        FLUX_FILES.load(path, "text_encoder", device="cpu", dtype="float32")


def test_what_no_network_can_be_made_of_is_told_with_its_file(arrays, tmp_path):
    path = tmp_path / "flux1-fill-dev.safetensors"
    save_file(path, arrays["transformer"] | {"img_in.weight": np.zeros((64, 384), np.float16)})
    with pytest.raises(ModelFileError, match=r"flux1-fill-dev\.safetensors: Flux: .* this is a Fill"):
        FLUX_FILES.parts(path, ["transformer"])


def test_the_digest_depends_on_the_component_alone(arrays, tmp_path):
    tensors = {PREFIXES[part] + name: x for part in ("transformer", "vae") for name, x in arrays[part].items()}
    save_file(tmp_path / "a.safetensors", tensors)
    name = PREFIXES["transformer"] + "img_in.bias"
    save_file(tmp_path / "b.safetensors", tensors | {name: tensors[name] + 1})
    a, b = (
        [FLUX_FILES.parts(tmp_path / f"{n}.safetensors", [c])[c].digest() for c in ("transformer", "vae")] for n in "ab"
    )
    assert a[0] != b[0]
    assert a[1] == b[1]


def test_refusals(arrays, tmp_path):
    path = tmp_path / "x.safetensors"
    for name in ("input_blocks.0.0.weight", "joint_blocks.0.x_block.attn.qkv.weight", "odd"):
        save_file(path, {name: np.zeros((4, 4, 3, 3), np.float16)})
        with pytest.raises(ModelFileError, match=r"expected Flux\.1, found"):
            FLUX_FILES.load(path, "transformer", device="cpu", dtype="float32")
    save_file(path, arrays["transformer"])
    with pytest.raises(ModelFileError, match="expected vae, but it holds no vae; use"):
        FLUX_FILES.load(path, "vae", device="cpu", dtype="float32")
    tensors = dict(arrays["transformer"])
    del tensors["double_blocks.1.img_mlp.0.bias"]
    tensors["single_blocks.0.linear1.weight"] = np.zeros((3, 64), np.float16)
    tensors["single_blocks.0.linear3.weight"] = np.zeros((3, 64), np.float16)
    save_file(path, tensors)
    with pytest.raises(ModelFileError) as told:
        FLUX_FILES.load(path, "transformer", device="cpu", dtype="float32")
    for words in ("double_blocks.1.img_mlp.0.bias", r"expected (448, 64), found (3, 64)", "linear3"):
        assert words in str(told.value)


def test_an_identity_counts_t5_as_the_second_encoder(arrays):
    shapes = {PREFIXES[part] + name: x.shape for part, found in arrays.items() for name, x in found.items()}
    assert identify(shapes).parts == ("transformer", "vae", "text_encoder", "text_encoder_2")
