"""Flux's tables against the key lists of the published files, in both layouts and both directions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.io.resolve import fit, native_shapes
from flame_train.models.flux import names as flux
from flame_train.models.flux.names import base_modules, transformer_to_diffusers
from flame_train.models.flux.transformer import Flux, FluxArch
from tests.keymaps import through

SINGLE, FOLDER = "flux_dev_single_file", "flux_diffusers_transformer"
GUIDANCE = {"single": "guidance_in", "folder": "time_text_embed.guidance_embedder"}


@pytest.fixture(scope="module")
def native(published):
    return published(SINGLE)


@pytest.fixture(scope="module")
def lists(published):
    return {"single": published(SINGLE), "folder": published(FOLDER)}


@pytest.mark.parametrize("layout", ["single", "folder"])
@pytest.mark.parametrize("model", ["dev", "schnell"])
def test_every_tensor_of_both_layouts_is_found_and_none_left(lists, native, layout, model):
    shapes, expected = lists[layout], native
    if model == "schnell":
        shapes = {name: shape for name, shape in shapes.items() if GUIDANCE[layout] not in name}
        expected = {name: shape for name, shape in expected.items() if "guidance_in" not in name}
    found = flux.FLUX_FILES.resolve(shapes, only="transformer")
    assert (found.unknown, found.ignored) == ((), ())
    sources = found.sources["transformer"]
    assert native_shapes(sources, shapes) == expected == Flux(replace(FluxArch.dev(), guidance=model == "dev")).shapes()
    assert sorted(n for s in sources.values() for n in s.names) == sorted(shapes)  # each used exactly once


def test_the_inverse_writes_the_diffusers_layout(lists, native):
    made = transformer_to_diffusers().pull(native)
    assert made.unknown == ()
    assert {name: source.made_shape(native) for name, source in made.sources.items()} == lists["folder"]


def test_values_survive_the_way_there_and_back(native):
    rng = np.random.default_rng(0)
    ours = {name: rng.standard_normal([max(2, size // 1536) for size in shape]) for name, shape in native.items()}
    back = through(transformer_to_diffusers().inverse, through(transformer_to_diffusers(), ours))
    assert back.keys() == ours.keys()
    assert all(np.array_equal(back[name], ours[name]) for name in ours)


def test_rows_by_value():
    d = 2
    file = {
        "double_blocks.3.txt_attn.qkv.weight": np.arange(3 * d),
        "single_blocks.7.linear1.bias": np.arange(7 * d),
        "final_layer.adaLN_modulation.1.weight": np.arange(2 * d),
    }
    made = through(transformer_to_diffusers(), file)
    assert {name: list(value) for name, value in made.items()} == {
        "transformer_blocks.3.attn.add_q_proj.weight": [0, 1],
        "transformer_blocks.3.attn.add_k_proj.weight": [2, 3],
        "transformer_blocks.3.attn.add_v_proj.weight": [4, 5],
        "single_transformer_blocks.7.attn.to_q.bias": [0, 1],
        "single_transformer_blocks.7.attn.to_k.bias": [2, 3],
        "single_transformer_blocks.7.attn.to_v.bias": [4, 5],
        "single_transformer_blocks.7.proj_mlp.bias": [6, 7, 8, 9, 10, 11, 12, 13],
        "norm_out.linear.weight": [2, 3, 0, 1],
    }


def below(prefix, shapes):
    return {prefix + name: shape for name, shape in shapes.items()}


IN_ONE_FILE = (
    "model.diffusion_model.",
    "vae.",
    "text_encoders.clip_l.transformer.",
    "text_encoders.t5xxl.transformer.",
)
IN_A_FOLDER = ("transformer/", "vae/", "text_encoder/", "text_encoder_2/")
WHOLE = {
    "all in one": (SINGLE, "flux_vae_single_file", *IN_ONE_FILE),
    "folder": (FOLDER, "flux_vae_diffusers", *IN_A_FOLDER),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_the_components_of_a_whole_model(published, native, kind):
    transformer, vae, *prefixes = WHOLE[kind]
    parts = [published(name) for name in (transformer, vae, "clip_l", "t5xxl_encoder")]
    shapes = {
        name: shape for prefix, part in zip(prefixes, parts, strict=True) for name, shape in below(prefix, part).items()
    }
    extra = {"text_encoders.clip_l.logit_scale": (), "text_encoders.t5xxl.logit_scale": ()}
    found = flux.FLUX_FILES.resolve(shapes | extra)
    assert found.unknown == ()
    assert set(found.ignored) == set(extra)
    names = ("transformer", "vae", "text_encoder", "text_encoder_2")
    expected = dict(zip(names, (native, published("flux_vae_single_file"), *parts[2:]), strict=True))
    for name in names:
        fitted = fit(found.sources[name], shapes, expected[name])
        assert (fitted.missing, fitted.unexpected, fitted.misshaped) == ((), (), ())


def test_base_modules_are_the_linear_layers(published, native):
    expected = {name.removesuffix(".weight") for name, shape in native.items() if len(shape) == 2}
    found = base_modules()
    assert set(found["transformer"]) == expected
    assert {part: len(modules) for part, modules in found.items()} == {
        "transformer": 314,
        "text_encoder": 72,
        "text_encoder_2": 168,
    }
    assert {f"{module}.weight" for module in found["text_encoder_2"]} <= published("t5xxl_encoder").keys()
    assert {f"{module}.weight" for module in found["text_encoder"]} <= published("clip_l").keys()
