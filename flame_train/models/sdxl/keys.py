"""SDXL's names: components, layouts, and how its LoRA files call every module."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Final

from flame_train.io.keymap import KeyMap, as_stored
from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import Component, Layout, Resolved
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.sdxl.keys_modules import base_modules
from flame_train.models.sdxl.keys_unet import SDXL_LEVELS, UNetLevels, unet_from_diffusers
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.text_encoders.clip.names import clip_from_bare_transformers, clip_from_openclip

_FP8: Final = r"scaled_fp8|.*\.scale_input"  # what marks a scaled fp8 file, or serves products in fp8
_TRAINED_WITH: Final = re.compile(r"loss\..*")  # a VAE's discriminator and the weight of its loss
# what is computed anew, and the other half of a whole CLIP
_TEXT_EXTRAS: Final = re.compile(
    rf"{_FP8}|(text_model\.)?embeddings\.position_ids|logit_scale|visual_projection\..*|vision_model\..*"
)
_CLIP_L_EXTRAS: Final = re.compile(rf"{_TEXT_EXTRAS.pattern}|text_projection(\.weight)?")
_ELSEWHERE: Final = re.compile(
    r"denoiser\.(log_)?sigmas|model_ema\..*|conditioner\.embedders\.0\.(logit_scale|text_projection.*)"
    r"|v_pred|ztsnr|betas|alphas_cumprod(_prev)?|(log_)?(one_minus|sqrt|posterior).*"
)
# EriDiffusion writes attention for levels of the UNet that have none in SDXL
_NO_ATTENTION: Final = re.compile(
    r"(input_blocks\.[12]|output_blocks\.[678])\.1\.transformer_blocks\.0\.attn[12]\.to_(q|k|v|out\.0)"
)

_ATTENTION: Final = re.compile(r".*\.(attn[12]\.to_(q|k|v|out\.0)|self_attn\.(q|k|v|out)_proj)")


def _unet_table(names: Collection[str]) -> KeyMap:
    return unet_from_diffusers(UNetLevels.of_diffusers(names))


def _vae_table(names: Collection[str]) -> KeyMap:
    found = [re.match(r"decoder\.up_blocks\.(\d+)\.", name) for name in names]
    return vae_from_diffusers(1 + max(int(match[1]) for match in found if match))


_TRANSFORMERS: Final = (
    Layout("transformers", "text_model.encoder.", as_stored),
    Layout("openclip", "transformer.resblocks.", lambda names: clip_from_openclip()),
    Layout("transformers, short", "encoder.layers.", lambda names: clip_from_bare_transformers()),
)
COMPONENTS: Final = (
    Component(
        "unet",
        ("model.diffusion_model.", "unet/", "diffusion_model."),
        (Layout("single-file", "input_blocks.", as_stored), Layout("diffusers", "down_blocks.", _unet_table)),
        re.compile(_FP8),
    ),
    Component(
        "vae",
        ("first_stage_model.", "vae/", "vae."),
        (Layout("diffusers", "decoder.up_blocks.", _vae_table), Layout("single-file", "decoder.up.")),
        _TRAINED_WITH,
    ),
    Component(
        "text_encoder",
        ("conditioner.embedders.0.transformer.", "text_encoder/"),
        _TRANSFORMERS,
        _CLIP_L_EXTRAS,
    ),
    Component(
        "text_encoder_2",
        ("conditioner.embedders.1.model.", "text_encoder_2/"),
        _TRANSFORMERS,
        _TEXT_EXTRAS,
    ),
)


def resolve(names: Iterable[str], only: str | None = None) -> Resolved:
    """Which tensor of a file, or of a diffusers folder, is which native tensor of which component.

    `names` as `open_weights` gives them. `only` ("unet", "vae", "text_encoder", "text_encoder_2") says that
    the file holds that component alone. Text encoders' native names are those of transformers, UNet's and
    VAE's those of the single file without its prefixes.
    """
    all_names = set(names)
    idle = {name for name in all_names if _ELSEWHERE.fullmatch(name)}
    found = resolve_components(COMPONENTS, all_names - idle, only)
    return replace(found, ignored=(*found.ignored, *sorted(idle)))


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """How SDXL LoRA files name the modules of SDXL base."""
    modules = base_modules()
    unet = modules_by_table(modules["unet"], unet_from_diffusers(SDXL_LEVELS).inverse)
    text = {name: modules_as_they_are(modules[name]) for name in ("text_encoder", "text_encoder_2")}
    native = ("diffusion_model.", "model.diffusion_model.", "")
    clip_l = ("text_encoders.clip_l.transformer.",)
    clip_g = ("text_encoders.clip_g.transformer.",)
    return LoraFamily(
        name="sdxl",
        components=(
            LoraComponent("unet", "lora_unet", unet, native, ("lycoris",), _NO_ATTENTION, _ATTENTION),
            LoraComponent("text_encoder", "lora_te1", text["text_encoder"], clip_l, alpha_lost=_ATTENTION),
            LoraComponent("text_encoder_2", "lora_te2", text["text_encoder_2"], clip_g, alpha_lost=_ATTENTION),
        ),
        base_version="sdxl_base_v1-0",
        architecture="stable-diffusion-xl-v1-base/lora",
        implementation="https://github.com/Stability-AI/generative-models",
        several_predictions=True,
    )
