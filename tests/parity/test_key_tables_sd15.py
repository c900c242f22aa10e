"""The name tables of Stable Diffusion 1 and 2 on every name and shape of the published sizes, against diffusers."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.torch_models import unet_arguments
from flame_train.adapters.dialects import spellings
from flame_train.adapters.factors import LoraFactors
from flame_train.config.schema import ModelSection
from flame_train.errors import ConfigError
from flame_train.families import family_data
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.family import Family
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.models.sd15.names import SD15_FILES, looks_like_v, lora_family, lora_family_of
from flame_train.models.sdxl.names_unet import SD_LEVELS, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.files.identify import identify
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.names import clip_from_openclip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.tools.lora_files import write_lora
from tests.keymaps import Arrays
from tests.parity import key_tables as check

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
single_file = pytest.importorskip("diffusers.loaders.single_file_utils")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TABLE = unet_from_diffusers(SD_LEVELS).inverse
VERSIONS = {False: (UNetArch.sd1(), ClipArch.clip_l(), 192 + 72), True: (UNetArch.sd2(), ClipArch.vit_h(), 192 + 138)}
UNETS = {v2: UNet(arch).shapes() for v2, (arch, _, _) in VERSIONS.items()}
TEXTS = {v2: ClipTextEncoder(arch).shapes() for v2, (_, arch, _) in VERSIONS.items()}
VAE = Vae(VaeArch.sd()).shapes()
TEXT_AT_THE_FIRST_LEVEL = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
TELLTALE = "output_blocks.11.1.transformer_blocks.0.norm1.bias"
BLOCKS = {"down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]}
BLOCKS |= {"up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3}


@pytest.fixture(scope="module")
def theirs():
    """diffusers' names and shapes, by version."""
    return {
        v2: check.on_meta(diffusers.UNet2DConditionModel, **unet_arguments(arch)) for v2, (arch, *_) in VERSIONS.items()
    }


@pytest.mark.parametrize("v2", VERSIONS)
def test_the_table_is_total_and_bijective(theirs, v2):
    check.check_bijective(TABLE, UNETS[v2], theirs[v2])
    assert UNetArch.from_shapes(UNETS[v2]) == VERSIONS[v2][0]


def test_values_are_those_of_diffusers_converters():
    config = {"layers_per_block": 2, "addition_embed_type": None, "class_embed_type": None, "num_class_embeds": None}
    thin = {name: [min(n, 2) for n in shape] for name, shape in UNETS[False].items()}
    check.check_values(thin, lambda file: single_file.convert_ldm_unet_checkpoint(file, config | BLOCKS), TABLE)


def test_values_of_vit_h_are_those_of_diffusers_converter():
    """Its 24 layers come in, of which 23 are used; the projection is no part of it."""
    width = 4
    arch = ClipArch(width, 24, 2, 8, "gelu", None, vocabulary=6, positions=5)
    stored = {n: s.made_shape(ClipTextEncoder(arch).shapes()) for n, s in _openclip(arch).items()}
    file = {f"cond_stage_model.model.{name}": torch.randn(shape) for name, shape in stored.items()}
    file["cond_stage_model.model.text_projection"] = torch.randn(width, width)
    file["cond_stage_model.model.logit_scale"] = torch.ones(())
    native = {name: array.numpy() for name, array in file.items()}
    found = SD15_FILES.resolve(native)
    assert found.unknown == ()
    config = SimpleNamespace(hidden_size=width)
    twin = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(hidden_size=width, num_hidden_layers=23, intermediate_size=8, num_attention_heads=2)
    )
    asked = SimpleNamespace(text_model=SimpleNamespace(config=config), state_dict=twin.state_dict)
    made = single_file.convert_open_clip_checkpoint(asked, dict(file), prefix="cond_stage_model.model.")
    ours = {name: source.read(Arrays(native)) for name, source in found.sources["text_encoder"].items()}
    bare = {name.removeprefix("text_model."): value for name, value in ours.items()}
    kept = {name.removeprefix("text_model."): value.numpy() for name, value in made.items()}
    kept.pop("embeddings.position_ids", None)
    kept = {
        name: value for name, value in kept.items() if name != "text_projection.weight" and ".layers.23." not in name
    }
    assert bare.keys() == kept.keys()
    assert all((bare[name] == kept[name]).all() for name in bare)


def _openclip(arch):
    return clip_from_openclip().inverse.pull(ClipTextEncoder(arch).shapes()).sources


def single(v2):
    """A whole checkpoint as published: A1111's prefixes, the moving average, the schedule."""
    text, prefix = TEXTS[v2], "cond_stage_model.transformer."
    if v2:
        whole = ClipTextEncoder(ClipArch(1024, 24, 16, 4096, "gelu", None)).shapes()
        pulled = clip_from_openclip().inverse.pull(whole).sources
        text = {name: source.made_shape(whole) for name, source in pulled.items()}
        text |= {"text_projection": (1024, 1024), "logit_scale": ()}
        prefix = "cond_stage_model.model."
    names = check.below({"model.diffusion_model.": UNETS[v2], prefix: text, "first_stage_model.": VAE})
    names |= {f"model_ema.diffusion_model{n.replace('.', '')}": s for n, s in UNETS[v2].items()}
    names |= {"model_ema.decay": (), "model_ema.num_updates": (), "betas": (1000,), "alphas_cumprod": (1000,)}
    return names | {"sqrt_recip_alphas_cumprod": (1000,), "posterior_variance": (1000,), "global_step": ()}


def folder(v2, unet):
    vae = {n: s.made_shape(VAE) for n, s in vae_from_diffusers().inverse.pull(VAE).sources.items()}
    return check.below({"unet/": unet, "text_encoder/": TEXTS[v2], "vae/": vae})


@pytest.mark.parametrize("v2", VERSIONS)
def test_whole_checkpoints_of_both_layouts_are_sorted(theirs, v2):
    """Every name of a full checkpoint and of a folder goes to its component, and no name is left."""
    networks = {"unet": UNETS[v2], "text_encoder": TEXTS[v2], "vae": VAE}
    for names in (single(v2), folder(v2, theirs[v2])):
        check.check_checkpoint(SD15_FILES.resolve, names, f"sd{1 + v2}", networks)
    for names in (UNETS[v2], check.below({"diffusion_model.": UNETS[v2]}), theirs[v2]):
        check.check_told(names, "unet", f"sd{1 + v2}")


def test_the_old_names_of_clip_without_text_model_are_read():
    names = single(False)
    old = {name.replace("transformer.text_model.", "transformer."): shape for name, shape in names.items()}
    old["cond_stage_model.transformer.embeddings.position_ids"] = (1, 77)
    assert old.keys() != names.keys()
    networks = {"unet": UNETS[False], "text_encoder": TEXTS[False], "vae": VAE}
    check.check_checkpoint(SD15_FILES.resolve, old, "sd1", networks)


@pytest.mark.parametrize("unet", ["model.diffusion_model.", "diffusion_model.", "", "unet/"])
def test_a_file_of_2_that_seems_to_predict_v_is_refused_until_the_config_says(tmp_path, theirs, unet, monkeypatch):
    """By the deviation that ComfyUI looks at; it is of 2 alone. `init` writes "epsilon", so that is no word for it."""
    base, names = tmp_path / "base.safetensors", [TELLTALE, TEXT_AT_THE_FIRST_LEVEL]
    if unet == "unet/":
        names = [
            "up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias",
            "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight",
        ]
        assert set(names) <= theirs[True].keys()
    for width, scale, refused in ((768, 0.1, False), (1024, 0.08, False), (1024, 0.1, True)):
        telltale = np.array([1, -1] * 4, np.float16) * np.float16(scale)
        text = np.zeros((8, width), np.float16)
        save_file(base, {unet + names[0]: telltale, unet + names[1]: text})
        assert looks_like_v(base) == refused
    monkeypatch.setattr(Family, "open", lambda _, opening: opening)  # the file holds no more than this
    opening = replace(NOTHING_NAMED, base=base)
    for given in (opening, replace(opening, model=ModelSection(prediction="epsilon"))):
        with pytest.raises(ConfigError, match="look like those of a Stable Diffusion 2 that predicts v"):
            FAMILIES["sd15"].open(given)
    said = replace(opening, model=ModelSection(prediction="v"))
    assert FAMILIES["sd15"].open(said) is said


@pytest.mark.parametrize(("channels", "what"), [(9, "inpainting"), (8, "InstructPix2Pix"), (5, "depth")])
def test_relatives_are_told_by_name(channels, what):
    names = single(False) | {"model.diffusion_model.input_blocks.0.0.weight": (320, channels, 3, 3)}
    assert f"Stable Diffusion 1.x ({what}), checkpoint" in identify(names).detail


def kohya_modules(v2):
    """What sd-scripts makes of diffusers' and transformers' modules: names and weights' shapes (networks/lora.py).

    Of the UNet every linear layer and 1x1 convolution inside a Transformer2DModel, and with `conv_dim` those of
    ResnetBlock2D, Downsample2D and Upsample2D; of the text encoder those inside CLIPAttention and CLIPMLP.
    """
    arch, clip, _ = VERSIONS[v2]
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**unet_arguments(arch))
        text = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                hidden_size=clip.width, num_hidden_layers=clip.layers, intermediate_size=clip.hidden
            )
        )
    plain, convs = {}, {}
    for root, prefix, classes in (
        (unet, "lora_unet", ("Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D")),
        (text, "lora_te", ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP")),
    ):
        for name, module in root.named_modules():
            if type(module).__name__ not in classes:
                continue
            for child, layer in module.named_modules():
                if not isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
                    continue
                path = (
                    f"{name}.{child}" if root is unet else f"text_model.{f'{name}.{child}'.removeprefix('text_model.')}"
                )
                spelled = f"{prefix}_{path}".replace(".", "_")
                of_transformer = type(module).__name__ == "Transformer2DModel" or root is text
                (plain if of_transformer else convs)[spelled] = tuple(layer.weight.shape)
    return plain, convs


@pytest.mark.parametrize("v2", VERSIONS)
def test_kohyas_names_are_those_of_its_own_network(v2):
    """All that its LoRA and its LoCon have, each once, and each for a layer of the same shape up to 1x1 kernels."""
    plain, convs = kohya_modules(v2)
    assert len(plain) == VERSIONS[v2][2]
    family = lora_family(v2, False)
    known, shapes = spellings(family), {"unet": UNETS[v2], "text_encoder": TEXTS[v2]}
    for name, shape in {**plain, **convs}.items():
        place = known[name]
        assert place.dialect == "kohya"
        assert shapes[place.component][f"{place.module}.weight"] == shape, name
    stem = r"(input_blocks|middle_block|output_blocks)\."
    inside = [m for m in family.components[0].modules if re.match(stem, m) and m != "input_blocks.0.0"]
    assert len(inside) == len([name for name in (*plain, *convs) if name.startswith("lora_unet")])


@pytest.mark.parametrize("v2", VERSIONS)
@pytest.mark.parametrize("dialect", ["kohya", "native", "peft"])
def test_loras_are_told(v2, dialect):
    """Whole, of the text encoder alone, and of what sees no text."""
    family = lora_family(v2, False)
    shapes = {"unet": UNETS[v2], "text_encoder": TEXTS[v2]}
    ends = ("lora_A", "lora_B") if dialect == "peft" else ("lora_down", "lora_up")
    names = {}
    for spelled, place in spellings(family).items():
        rows, width, *kernel = shapes[place.component][f"{place.module}.weight"]
        if place.dialect == dialect:
            names[f"{spelled}.{ends[0]}.weight"] = (4, width, *kernel)
            names[f"{spelled}.{ends[1]}.weight"] = (rows, 4, *[1] * len(kernel))
    check.check_told(names, "lora", f"sd{1 + v2}")
    assert lora_family_of(names) is family
    assert identify({n: s for n, s in names.items() if "attn1" in n}).family == "sd15"


@pytest.mark.parametrize(
    ("v2", "v", "version", "architecture"),
    [
        (False, False, "sd_v1", "stable-diffusion-v1/lora"),
        (False, True, "sd_v1_v", "stable-diffusion-v1/lora"),
        (True, False, "sd_v2", "stable-diffusion-v2-512/lora"),
        (True, True, "sd_v2_v", "stable-diffusion-v2-768-v/lora"),
    ],
)
def test_metadata_are_kohyas(v2, v, version, architecture):
    found = lora_family(v2, v)
    assert (found.base_version, found.architecture, found.implementation) == (version, architecture, "diffusers")
    assert identify({"x.lora_down.weight": (4, 8)}, {"ss_base_model_version": version}).family == f"sd{1 + v2}"


def test_a_tool_that_makes_another_network_of_a_file_keeps_what_its_base_predicts(tmp_path):
    """The tensors do not tell it; rank and alpha are the new network's."""
    factors = LoraFactors(np.ones((2, 8), np.float16), np.ones((8, 2), np.float16), 1.0)
    state = {"unet": {"middle_block.1.transformer_blocks.0.attn1.to_q": factors}}
    source = {"ss_base_model_version": "sd_v1_v", "ss_v2": "False", "ss_network_dim": "16"}
    write_lora(tmp_path / "x.safetensors", state, lora_family(False, False), "kohya", source)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert (file.metadata["ss_base_model_version"], file.metadata["ss_network_dim"]) == ("sd_v1_v", "2")


def test_diffusers_knows_the_pipeline_that_is_named():
    assert hasattr(diffusers, family_data("sd15")["diffusers"]["pipeline"])
