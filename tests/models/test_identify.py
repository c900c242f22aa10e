"""Every published key list is told for what it is, with and without its usual prefix."""

from __future__ import annotations

import pytest

from flame_train.models.registry import FAMILIES
from flame_train.networks.files.identify import could_be, identify, model_names
from tests.golden_keys import golden


def tensors(name):
    return {key: tuple(shape) for key, shape in golden(name).items()}


def kohya(name, rank=4):
    found = {}
    for module, base in golden(name).items():
        out, into, *kernel = base["shape"]
        found[f"{module}.lora_down.weight"] = (rank, into, *kernel)
        found[f"{module}.lora_up.weight"] = (out, rank, *([1] * len(kernel)))
        found[f"{module}.alpha"] = ()
    return found


def prefixed(prefix, shapes):
    return {prefix + name: shape for name, shape in shapes.items()}


def without(shapes, *parts):
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in parts)}


def sd1_unet(context=768, **more):
    return {
        "input_blocks.0.0.weight": (320, 4, 3, 3),
        "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, context),
    } | more


def transformer(shapes, family, layout):
    return shapes, "transformer", family, layout, ("transformer",)


def with_vae(shapes, family):
    return shapes, "checkpoint", family, "single-file", ("transformer", "vae")


SDXL = tensors("sdxl_base_single_file")
FLUX = tensors("flux_dev_single_file")
FOLDER = {
    f"{part}/{name}": shape
    for part in ("unet", "vae", "text_encoder", "text_encoder_2")
    for name, shape in tensors(f"sdxl_diffusers_{part}").items()
}
UNET_OF_SDXL = {n.removeprefix("model."): s for n, s in SDXL.items() if "diffusion_model" in n}
ALL = ("unet", "vae", "text_encoder", "text_encoder_2")

MODELS = {
    "SDXL": (SDXL, "checkpoint", "sdxl", "single-file", ALL),
    "SDXL folder": (FOLDER, "checkpoint", "sdxl", "diffusers", ALL),
    "SDXL unet, prefixed": (UNET_OF_SDXL, "unet", "sdxl", "single-file", ("unet",)),
    "SDXL unet folder": (tensors("sdxl_diffusers_unet"), "unet", "sdxl", "diffusers", ("unet",)),
    "SDXL vae folder": (tensors("sdxl_diffusers_vae"), "vae", "sd1-sd2-sdxl", "diffusers", ("vae",)),
    "SDXL vae, single": (
        {n.removeprefix("first_stage_model."): s for n, s in SDXL.items() if "first_stage" in n},
        "vae",
        "sd1-sd2-sdxl",
        "single-file",
        ("vae",),
    ),
    "refiner": (
        prefixed("model.diffusion_model.", sd1_unet(1280, **{"label_emb.0.0.weight": (1536, 2560)})),
        "unet",
        "sdxl-refiner",
        "single-file",
        ("unet",),
    ),
    "SD1": (
        prefixed("model.diffusion_model.", sd1_unet()) | {"cond_stage_model.transformer.x": (1,)},
        "checkpoint",
        "sd1",
        "single-file",
        ("unet", "text_encoder"),
    ),
    "SD2 unCLIP": (
        sd1_unet(1024, **{"label_emb.0.0.weight": (1280, 2048)}),
        "unet",
        "unknown",
        "single-file",
        ("unet",),
    ),
    "SD1 inpainting": (
        sd1_unet() | {"input_blocks.0.0.weight": (320, 9, 3, 3)},
        "unet",
        "sd1",
        "single-file",
        ("unet",),
    ),
    "SD2": (sd1_unet(1024), "unet", "sd2", "single-file", ("unet",)),
    "Flux dev": transformer(FLUX, "flux-dev", "single-file"),
    "Flux dev, prefixed": transformer(prefixed("model.diffusion_model.", FLUX), "flux-dev", "single-file"),
    "Flux schnell": transformer(without(FLUX, "guidance_in"), "flux-schnell", "single-file"),
    "Flux fill": transformer(FLUX | {"img_in.weight": (3072, 384)}, "flux-fill", "single-file"),
    "Chroma": transformer(FLUX | {"distilled_guidance_layer.in_proj.weight": (1,)}, "chroma", "single-file"),
    "Flux.2 dev": transformer(FLUX | {"single_stream_modulation.lin.weight": (1,)}, "flux2", "single-file"),
    "Flux.2 klein": transformer(
        without(FLUX, "guidance_in") | {"single_stream_modulation.lin.weight": (1,)}, "flux2", "single-file"
    ),
    "Flux folder": transformer(tensors("flux_diffusers_transformer"), "flux-dev", "diffusers"),
    "Flux vae": (tensors("flux_vae_single_file"), "vae", "sd3-flux", "single-file", ("vae",)),
    "Flux vae folder": (tensors("flux_vae_diffusers"), "vae", "sd3-flux", "diffusers", ("vae",)),
    "SD3 medium": with_vae(tensors("sd3_medium_single_file"), "sd3-medium"),
    "SD3.5 medium": with_vae(tensors("sd35_medium_single_file"), "sd35-medium"),
    "SD3.5 large": with_vae(tensors("sd35_large_single_file"), "sd35-large"),
    "SD3 medium folder": transformer(tensors("sd3_medium_diffusers_transformer"), "sd3-medium", "diffusers"),
    "SD3.5 medium folder": transformer(tensors("sd35_medium_diffusers_transformer"), "sd35-medium", "diffusers"),
    "SD3.5 large folder": transformer(tensors("sd35_large_diffusers_transformer"), "sd35-large", "diffusers"),
    "CLIP-L": (tensors("clip_l"), "text_encoder", "clip-l", "transformers", ("text_encoder",)),
    "CLIP-L, short names": (
        {n.removeprefix("text_model."): s for n, s in tensors("clip_l").items()},
        "text_encoder",
        "clip-l",
        "transformers",
        ("text_encoder",),
    ),
    "bigG": (tensors("sdxl_diffusers_text_encoder_2"), "text_encoder", "clip-bigg", "transformers", ("text_encoder",)),
    "bigG OpenCLIP": (
        {n.removeprefix("conditioner.embedders.1.model."): s for n, s in SDXL.items() if "embedders.1" in n},
        "text_encoder",
        "clip-bigg",
        "openclip",
        ("text_encoder",),
    ),
    "T5": (tensors("t5xxl_encoder"), "text_encoder", "t5-xxl", "transformers", ("text_encoder",)),
    "nothing known": ({"a.weight": (3, 3)}, "unknown", "unknown", "", ()),
    "no tensors": ({}, "unknown", "unknown", "", ()),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    shapes, kind, family, layout, parts = MODELS[name]
    found = identify(shapes)
    assert (found.kind, found.family, found.layout, found.parts) == (kind, family, layout, parts)
    assert model_names().get(family, "known") in found.detail


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("lora_kohya_sdxl", "sdxl"),
        ("lora_kohya_sdxl_conv", "sdxl"),
        ("lora_kohya_flux", "flux"),
        ("lora_kohya_flux_with_t5", "flux"),
        ("lora_kohya_sd35_large", "sd35-large"),
        ("lora_kohya_sd35_medium", "sd35-medium"),
        ("lora_kohya_sd3_medium", "sd3"),
    ],
)
def test_kohya_loras(name, family):
    shapes = kohya(name)
    assert (identify(shapes).kind, identify(shapes).family, identify(shapes).layout) == (
        "lora",
        family,
        "kohya",
    )
    bases = [base for module, base in golden(name).items() if module.startswith("lora_unet_")]
    paths = [base["base"].removeprefix("model.diffusion_model.").removesuffix(".weight") for base in bases]
    native = {
        f"diffusion_model.{path}.lora_A.weight": (4, base["shape"][1]) for path, base in zip(paths, bases, strict=True)
    }
    assert (identify(native).family, identify(native).layout) == (family, "native")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("lora_peft_sdxl", "sdxl"),
        ("lora_peft_flux", "flux"),
        ("lora_peft_sd35_large", "sd35-large"),
        ("lora_peft_sd35_medium", "sd3"),
        ("lora_peft_sd3_medium", "sd3"),
    ],
)
def test_peft_loras(name, family):
    for target_set, shapes in golden(name).items():
        found = identify({key: tuple(shape) for key, shape in shapes.items()})
        expected = "sd35-medium" if "attn2" in target_set else family
        assert (found.kind, found.family, found.layout) == ("lora", expected, "peft")


@pytest.mark.parametrize("prefix", ["transformer.", "", "base_model.model.", "base_model.model.transformer."])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        ("attn.to_q", lambda width: (4, width)),
        ("attn.to_add_out", lambda width: (4, width)),
        ("ff.net.0.proj", lambda width: (4, width)),
        ("ff.net.2", lambda width: (4, 4 * width)),
        ("ff_context.net.2", lambda width: (4, 4 * width)),
        ("norm1_context.linear", lambda width: (4, width)),
    ],
)
def test_one_layer_of_some_block_tells_a_transformer_by_its_width(prefix, layer, shape):
    """As diffusers' `--lora_blocks` and `--lora_layers` make files: neither the first block nor attention is there."""
    for width, family in ((3072, "flux"), (2432, "sd35-large"), (1536, "sd3")):
        found = identify({f"{prefix}transformer_blocks.12.{layer}.lora_A.weight": shape(width)})
        assert (found.kind, found.family) == ("lora", family)


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes' 4 bits"),
        ("weight.absmax", "bitsandbytes' 4 bits"),
        ("SCB", "bitsandbytes' 8 bits"),
        ("comfy_quant", "ComfyUI's quantised format"),
        ("weight_scale_2", "NVFP4"),
    ],
)
def test_packed_weights_are_no_model_of_another_family(packed, words):
    """The shapes of packed weights are no shapes of the model: NF4's first layer has that of Flux Fill."""
    shapes = {name: tuple(shape) for name, shape in golden("flux_dev_single_file").items()} | {
        "img_in.weight": (98304, 1)
    }
    found = identify(shapes | {f"double_blocks.0.img_attn.qkv.{packed}": (100,)})
    assert (found.kind, found.family) == ("quantised", "unknown")
    assert words in found.detail


def test_xlabs_names_are_told():
    shapes = {f"double_blocks.0.processor.qkv_lora1.{part}.weight": (4, 4) for part in ("down", "up")}
    found = identify(shapes)
    assert (found.kind, found.family) == ("adapter", "flux")
    assert "XLabs" in found.detail


def test_a_base_model_is_no_adapter():
    """BFL's norms and the words `diffusion_model` have what adapters' names have."""
    shapes = {f"model.diffusion_model.{n}": tuple(s) for n, s in golden("flux_dev_single_file").items()}
    assert identify(shapes).kind == "transformer"


def test_chroma_has_fluxs_names_and_says_so_in_its_metadata():
    flux = kohya("lora_kohya_flux")
    assert identify(flux, {"modelspec.architecture": "chroma/lora"}).family == "chroma"
    assert identify(flux, {"modelspec.architecture": "flux-1-dev/lora"}).family == "flux"


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
def test_models_that_share_fluxs_names_are_told_by_what_they_have_alone(prefix):
    """Chroma's layer that makes all modulations; the gated feed-forward of Flux.2, whose first layer is wider."""

    def found(shapes):
        spelled = {n.replace(".", "_") if prefix.endswith("_") else n: size for n, size in shapes.items()}
        pairs = {".lora_down.weight": lambda o, i: (4, i), ".lora_up.weight": lambda o, i: (o, 4)}
        return identify({prefix + n + end: made(*size) for n, size in spelled.items() for end, made in pairs.items()})

    qkv = {"double_blocks.0.img_attn.qkv": (9216, 3072)}
    assert found(qkv | {"single_blocks.0.linear1": (21504, 3072)}).family == "flux"
    assert found(qkv | {"distilled_guidance_layer.in_proj": (5120, 64)}).family == "chroma"
    for width in (3072, 4096, 6144):
        assert found({"single_blocks.7.linear1": (9 * width, width)}).family == "flux2"
    name = "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight"
    assert identify({name: (4, 3072)}).family == "flux2"


@pytest.mark.parametrize(
    "name", ["double_blocks.0.img_attn.qkv", "joint_blocks.0.x_block.attn.qkv", "model.diffusion_model.x"]
)
def test_published_names_are_native_with_and_without_a_prefix(name):
    assert identify({f"{name}.lora_A.weight": (4, 3072)}).layout == "native"


def test_metadata_decides_only_what_names_cannot():
    sd3 = kohya("lora_kohya_sd3_medium")
    assert identify(sd3, {"modelspec.architecture": "stable-diffusion-3-medium/lora"}).family == "sd3-medium"
    assert identify(kohya("lora_kohya_sdxl"), {"ss_base_model_version": "flux1"}).family == "sdxl"
    text_only = {name: s for name, s in kohya("lora_kohya_sdxl").items() if name.startswith("lora_te")}
    assert identify(text_only).family == "sdxl-sd3"
    assert identify(text_only, {"ss_base_model_version": "sdxl_base_v1-0"}).family == "sdxl"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_run_writes_down_names_its_family(family):
    """Where names tell nothing: "flux" stands in what FLUX.2 and FLUX.3 write, too."""
    own = FAMILIES[family].lora_names_in({})
    nothing = {"lora_unet_x.lora_down.weight": (4, 64)}
    for told in ({"ss_base_model_version": own.base_version}, {"modelspec.architecture": own.architecture}):
        assert could_be(identify(nothing, told).family, family)


@pytest.mark.parametrize("layer", ["to_q", "to_k", "to_v"])
def test_metadata_tells_flux3_from_flux1_where_their_names_are_one(layer):
    name = f"transformer.single_transformer_blocks.0.attn.{layer}"
    shapes = {f"{name}.lora_A.weight": (4, 3072), f"{name}.lora_B.weight": (3072, 4)}
    assert identify(shapes).family == "flux"
    assert identify(shapes, {"modelspec.architecture": "flux-3-image-klein/lora"}).family == "flux3"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("oft_blocks", "OFT"),
        ("oft_R.weight", "OFT"),
        ("hada_t1", "LoHa"),
        ("lokr_t2", "LoKr"),
        ("lora_mid.weight", "LoCon"),
        ("a1.weight", "GLoRA"),
        ("on_input", "IA3"),
        ("diff_b", "full differences"),
        ("lora_B.bias", "LoRA with biases, such as BFL's control LoRAs"),
    ],
)
def test_relatives_of_lora_that_are_not_read(key, words):
    found = identify(kohya("lora_kohya_sdxl") | {f"lora_unet_x.{key}": (4, 4)})
    assert found.kind == "adapter"
    assert words in found.detail


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({"hada_w1_a": (9, 2), "hada_w1_b": (2, 5)}, "LoHa for SDXL, kohya names"),
        ({"lokr_w1": (3, 2)}, "LoKr for SDXL, kohya names"),
        ({"lora_down.weight": (2, 5), "dora_scale": (1, 5)}, "DoRA, norms of input columns as LyCORIS has them, for"),
        ({"lora_down.weight": (2, 5), "dora_scale": (9, 1)}, "DoRA, norms of output rows as LyCORIS has them, for"),
        ({"lora_A.weight": (2, 5), "lora_magnitude_vector": (9,)}, "DoRA, norms of output rows as PEFT has them, for"),
        ({"lora_A.weight": (2, 5), "magnitude": (9,)}, "DoRA, norms of output rows as ai-toolkit has them, for"),
    ],
)
def test_kinds_that_are_read_are_named(ends, words):
    module = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    found = identify({f"{module}.{end}": shape for end, shape in ends.items()}, {"ss_base_model_version": "sdxl_base"})
    assert (found.kind, found.family) == ("lora", "sdxl")
    assert found.detail.startswith(words)


@pytest.mark.parametrize(
    "end", ["lora.down.weight", "lora_linear_layer.down.weight", "lora_A.default.weight", "lora_A.weight"]
)
def test_older_peft_spellings(end):
    name = f"unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.{end}"
    assert identify({name: (4, 2048)}).family == "sdxl"
    old = "unet.mid_block.attentions.0.transformer_blocks.0.attn2.processor.to_k_lora.down.weight"
    assert (identify({old: (4, 768)}).kind, identify({old: (4, 768)}).family) == ("lora", "sd1")


def test_could_be():
    assert could_be("sdxl", "sdxl")
    assert could_be("sdxl-sd3", "sdxl")
    assert could_be("unknown", "sdxl")
    assert could_be("flux", "flux-dev")
    assert could_be("flux-dev", "flux")
    assert not could_be("flux-dev", "sdxl")
    assert not could_be("sd1", "sdxl")
    assert not could_be("sdxl-refiner", "sdxl")
