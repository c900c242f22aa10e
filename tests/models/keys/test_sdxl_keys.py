"""SDXL's tables against the key lists of the published files, in both layouts and both directions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flame_train.io.keymap import KeyMap, Op, Rule
from flame_train.io.resolve import fit
from flame_train.models.sdxl import names as sdxl
from flame_train.models.sdxl.names_unet import UNetLevels, unet_from_diffusers
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.text_encoders.clip.names import clip_from_openclip
from tests.golden_keys import golden
from tests.keymaps import Arrays, through

PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}
COUNTS = {"unet": 1680, "vae": 248, "text_encoder": 196, "text_encoder_2": 517}
PARAMETERS = {
    "unet": 2_567_463_684,
    "vae": 83_653_863,
    "text_encoder": 123_060_480,
    "text_encoder_2": 694_659_840,
}


def shapes_of(name):
    return {key: tuple(shape) for key, shape in golden(name).items()}


@pytest.fixture(scope="module")
def single():
    return shapes_of("sdxl_base_single_file")


@pytest.fixture(scope="module")
def folder():
    return {f"{part}/{name}": shape for part in COUNTS for name, shape in shapes_of(f"sdxl_diffusers_{part}").items()}


@pytest.fixture(scope="module")
def native(single):
    """Component -> native name -> shape, made from the lists alone, without the tables under test."""
    strip = {part: len(prefix) for part, prefix in PREFIXES.items()}
    found = {
        part: {name[strip[part] :]: s for name, s in single.items() if name.startswith(PREFIXES[part])}
        for part in ("unet", "vae")
    }
    return found | {part: shapes_of(f"sdxl_diffusers_{part}") for part in ("text_encoder", "text_encoder_2")}


@pytest.mark.parametrize("layout", ["single", "folder"])
def test_every_tensor_of_both_layouts_is_found_and_none_left(layout, request, native):
    shapes = request.getfixturevalue(layout)
    found = sdxl.SDXL_FILES.resolve(shapes)
    assert found.unknown == ()
    assert {part: len(sources) for part, sources in found.sources.items()} == COUNTS
    used = [name for part in found.sources.values() for s in part.values() for name in s.names if s.part == 0]
    assert sorted([*used, *found.ignored]) == sorted(shapes)  # each file tensor used exactly once
    for part, sources in found.sources.items():
        fitted = fit(sources, shapes, native[part])
        assert (fitted.missing, fitted.unexpected, fitted.misshaped) == ((), (), ())
        made = {name: source.made_shape(shapes) for name, source in fitted.sources.items()}
        assert made == native[part]
        assert sum(math.prod(shape) for shape in made.values()) == PARAMETERS[part]


def test_what_is_left_out_of_the_single_file_is_known(single):
    assert set(sdxl.SDXL_FILES.resolve(single).ignored) == {
        "conditioner.embedders.0.transformer.text_model.embeddings.position_ids",
        "conditioner.embedders.1.model.logit_scale",
    }


@pytest.mark.parametrize(
    ("keymap", "part", "there"),
    [
        (unet_from_diffusers(), "unet", shapes_of("sdxl_diffusers_unet")),
        (vae_from_diffusers(), "vae", shapes_of("sdxl_diffusers_vae")),
    ],
)
def test_inverse_writes_the_other_layout(keymap, part, there, native):
    back = keymap.inverse.pull(native[part])
    assert back.unknown == ()
    assert {name: source.made_shape(native[part]) for name, source in back.sources.items()} == there


def test_inverse_of_the_text_table_writes_openclip_names(native, single):
    prefix = PREFIXES["text_encoder_2"]
    theirs = {name[len(prefix) :]: shape for name, shape in single.items() if name.startswith(prefix)}
    back = clip_from_openclip().inverse.pull(native["text_encoder_2"])
    made = {name: source.made_shape(native["text_encoder_2"]) for name, source in back.sources.items()}
    assert back.unknown == ()
    assert made | {"logit_scale": ()} == theirs


def tiny(shapes, seed=0):
    """Arrays with each dimension over 3 cut to 6, distinct values: enough to catch any mix-up."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal([min(size, 6) for size in shape]) for name, shape in shapes.items()}


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder_2"])
def test_values_survive_the_way_there_and_back(part, native):
    keymap = {"unet": unet_from_diffusers, "vae": vae_from_diffusers, "text_encoder_2": clip_from_openclip}[part]()
    ours = tiny(native[part])
    theirs = through(keymap.inverse, ours)
    back = through(keymap, theirs)
    assert back.keys() == ours.keys()
    assert all(np.array_equal(back[name], ours[name]) for name in ours)


def test_openclip_rows_and_transpose_by_value():
    d = 4
    fused, projection = np.arange(3 * d * d).reshape(3 * d, d), np.arange(d * d).reshape(d, d)
    file = {
        "transformer.resblocks.7.attn.in_proj_weight": fused,
        "transformer.resblocks.7.attn.in_proj_bias": np.arange(3 * d),
        "text_projection": projection,
    }
    made = through(clip_from_openclip(), file)
    layer = "text_model.encoder.layers.7.self_attn."
    for index, part in enumerate("qkv"):
        np.testing.assert_array_equal(made[f"{layer}{part}_proj.weight"], fused[index * d : (index + 1) * d])
        np.testing.assert_array_equal(made[f"{layer}{part}_proj.bias"], np.arange(index * d, (index + 1) * d))
    np.testing.assert_array_equal(made["text_projection.weight"], projection.T)
    # x @ text_projection is what a linear layer does with the weight read here
    x = np.arange(d)
    np.testing.assert_array_equal(x @ projection, made["text_projection.weight"] @ x)


class TestAliases:
    def test_old_vae_attention_names(self):
        shapes = shapes_of("sdxl_diffusers_vae")
        rename = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

        def old(name):
            for new, before in rename.items():
                name = name.replace(f"attentions.0.{new}.", f"attentions.0.{before}.")
            return name

        new = sdxl.SDXL_FILES.resolve(shapes, only="vae")
        before = sdxl.SDXL_FILES.resolve(map(old, shapes), only="vae")
        assert before.unknown == ()
        assert before.sources["vae"].keys() == new.sources["vae"].keys()
        source = before.sources["vae"]["encoder.mid.attn_1.q.weight"]
        assert source.names == ("encoder.mid_block.attentions.0.query.weight",)

    @pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
    def test_text_model_may_be_missing(self, part, native):
        names = [name.removeprefix("text_model.") for name in native[part]]
        found = sdxl.SDXL_FILES.resolve(names, only=part)
        assert found.unknown == ()
        assert found.sources[part].keys() == native[part].keys()

    def test_projection_as_a_linear_weight_among_openclip_names(self, single):
        names = {name.replace(".text_projection", ".text_projection.weight") for name in single}
        source = sdxl.SDXL_FILES.resolve(names).sources["text_encoder_2"]["text_projection.weight"]
        assert source.op is Op.COPY
        both = sdxl.SDXL_FILES.resolve(names | set(single))
        assert both.unknown == ("conditioner.embedders.1.model.text_projection.weight",)

    @pytest.mark.parametrize("to_conv", [True, False])
    def test_squeeze_either_way(self, to_conv, native, single):
        """A linear stored as a 1x1 convolution is read, and the other way round; by values, in C order."""
        name = "input_blocks.4.1.proj_in.weight" if to_conv else "encoder.mid.attn_1.q.weight"
        part = "unet" if to_conv else "vae"
        stored = {**single}
        file_name = PREFIXES[part] + name
        stored[file_name] = (640, 640, 1, 1) if to_conv else (512, 512)
        fitted = fit(sdxl.SDXL_FILES.resolve(stored).sources[part], stored, native[part])
        assert fitted.misshaped == ()
        value = np.arange(math.prod(stored[file_name])).reshape(stored[file_name])
        read = fitted.sources[name].read(Arrays({file_name: value}))
        assert read.shape == native[part][name]
        assert np.array_equal(read.ravel(), value.ravel())

    def test_extra_names_that_mean_nothing_here(self, single):
        extra = ["denoiser.sigmas", "denoiser.log_sigmas", "model_ema.decay", "betas", "alphas_cumprod"]
        extra += ["sqrt_one_minus_alphas_cumprod", "conditioner.embedders.0.logit_scale"]
        found = sdxl.SDXL_FILES.resolve([*single, *extra])
        assert found.unknown == ()
        assert set(extra) <= set(found.ignored)


def test_all_that_is_wrong_is_told_at_once(single, native):
    shapes = dict(single)
    del shapes["model.diffusion_model.input_blocks.0.0.bias"]
    shapes["model.diffusion_model.input_blocks.0.0.weight"] = (320, 9, 3, 3)
    shapes["model.diffusion_model.input_blocks.99.0.weight"] = (1,)
    shapes["something.else"] = (1,)
    found = sdxl.SDXL_FILES.resolve(shapes)
    assert found.unknown == ("something.else",)
    fitted = fit(found.sources["unet"], shapes, native["unet"])
    assert fitted.missing == ("input_blocks.0.0.bias",)
    assert fitted.unexpected == ("input_blocks.99.0.weight",)
    assert fitted.misshaped == (("input_blocks.0.0.weight", (320, 4, 3, 3), (320, 9, 3, 3)),)


def test_a_diffusers_name_that_fits_no_rule_is_unknown(folder):
    found = sdxl.SDXL_FILES.resolve([*folder, "unet/down_blocks.0.attentions.0.proj_in.weight2", "unet/mystery.weight"])
    assert found.unknown == ("unet/down_blocks.0.attentions.0.proj_in.weight2", "unet/mystery.weight")


OTHER_DEPTHS = [(1, (True,)), (1, (False, True)), (2, (True, True, True, False)), (3, (False, False))]


@pytest.mark.parametrize("levels", [UNetLevels(*depth) for depth in OTHER_DEPTHS])
def test_tables_of_other_depths_are_bijective_and_read_off_the_names(levels):
    keymap = unet_from_diffusers(levels)
    there = {source.replace("{k}", "0") for rule in keymap.rules for source in rule.source}
    here = {target.replace("{k}", "0") for rule in keymap.rules for target in rule.target}
    assert UNetLevels.of_diffusers(there) == levels
    pulled = keymap.pull(there)
    assert (set(pulled.sources), pulled.unknown) == (here, ())
    assert set(keymap.inverse.pull(here).sources) == there


def test_a_table_cannot_be_ambiguous():
    with pytest.raises(ValueError, match="target patterns given twice"):
        KeyMap((Rule(("a",), ("c",)), Rule(("b",), ("c",))))
    with pytest.raises(ValueError, match="one side of a rule must have one name"):
        KeyMap((Rule(("a", "b"), ("c", "d")),))


def test_base_modules_are_the_weights_a_lora_can_sit_on(native):
    modules = {c.name: tuple(c.modules) for c in sdxl.lora_family().components}
    for part, found in modules.items():
        expected = {
            name.removesuffix(".weight")
            for name, shape in native[part].items()
            if name.endswith(".weight") and len(shape) >= 2 and "embedding.weight" not in name
        }
        assert set(found) == expected
        assert len(found) == len(expected)
    assert {part: len(found) for part, found in modules.items()} == {
        "unet": 794,
        "text_encoder": 72,
        "text_encoder_2": 193,
    }


def test_the_upsampler_comes_second_in_a_level_without_attention():
    """As in SD1, whose deepest level has none: output_blocks.2.1.conv there, output_blocks.5.2.conv above it."""
    sources = unet_from_diffusers(UNetLevels(2, (True, True, True, False))).pull(
        [f"up_blocks.{level}.upsamplers.0.conv.weight" for level in (0, 1, 2)]
    )
    assert set(sources.sources) == {f"output_blocks.{n}.conv.weight" for n in ("2.1", "5.2", "8.2")}
