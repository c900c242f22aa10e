"""SDXL's names: components, layouts, and how its LoRA files call every module."""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import Final

from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import resolve
from flame_train.models.sdxl.names_unet import (
    ALPHA_LOST,
    IN_UNET,
    SDXL_LEVELS,
    UNET_COMPONENT,
    UNET_MODULES,
    unet_from_diffusers,
)
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks, Shape, Shapes, Width, dim
from flame_train.networks.vae.names import VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip import names as clip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder

_ELSEWHERE: Final = re.compile(
    r"denoiser\.(log_)?sigmas|model_ema\..*|conditioner\.embedders\.0\.(logit_scale|text_projection.*)"
    r"|v_pred|ztsnr|betas|alphas_cumprod(_prev)?|(log_)?(one_minus|sqrt|posterior).*"
)
# EriDiffusion writes attention for levels of the UNet that have none in SDXL
_NO_ATTENTION: Final = re.compile(
    r"(input_blocks\.[12]|output_blocks\.[678])\.1\.transformer_blocks\.0\.attn[12]\.to_(q|k|v|out\.0)"
)

COMPONENTS: Final = (
    UNET_COMPONENT,
    VAE,
    clip.clip_l("conditioner.embedders.0.transformer."),
    clip.clip_g("conditioner.embedders.1.model."),
)


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how SDXL LoRA files name the modules of SDXL base."""
    unet = modules_by_table(UNET_MODULES, unet_from_diffusers(SDXL_LEVELS).inverse)
    text_l, text_g = (modules_as_they_are(modules) for modules in (clip.CLIP_L_MODULES, clip.CLIP_G_MODULES))
    native = ("diffusion_model.", "model.diffusion_model.", "")
    clip_l = ("text_encoders.clip_l.transformer.",)
    clip_g = ("text_encoders.clip_g.transformer.",)
    return LoraFamily(
        name="sdxl",
        components=(
            LoraComponent("unet", "lora_unet", unet, native, ("lycoris",), _NO_ATTENTION, ALPHA_LOST),
            LoraComponent("text_encoder", "lora_te1", text_l, clip_l, alpha_lost=ALPHA_LOST),
            LoraComponent("text_encoder_2", "lora_te2", text_g, clip_g, alpha_lost=ALPHA_LOST),
        ),
        base_version="sdxl_base_v1-0",
        architecture="stable-diffusion-xl-v1-base/lora",
        implementation="https://github.com/Stability-AI/generative-models",
        several_predictions=True,
    )


_NETWORKS: Final = built_by(
    unet=(UNet, UNetArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.sdxl())),
    text_encoder=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="quick_gelu")),
    text_encoder_2=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="gelu")),
)
_ALONE: Final = {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2"}
SDXL_FILES: Final = FamilyFiles("sdxl", COMPONENTS, _ALONE, _NETWORKS, partial(resolve, idle=_ELSEWHERE))


_INPUTS: Final = {4: "", 8: " (edit)", 9: " (inpainting)"}
_LABELS: Final[dict[Shape | None, str]] = {(1536, 2560): "sdxl-refiner", (1280, 2816): "sdxl"}
_PLACES: Final = (
    ("input_blocks.0.0.weight", "label_emb.0.0.weight", "input_blocks.1.1"),
    ("conv_in.weight", "add_embedding.linear_1.weight", "down_blocks.0.attentions.0"),
)


def _unet(model: str, shapes: Shapes) -> tuple[str, str] | None:
    """Says which UNet it is, by its input, by what embeds sizes, and by the text's width at the first level, if any."""
    first, embedding, level = next(places for places in _PLACES if places[0] in shapes)
    if len(shapes[first]) != 4:
        return None
    note = _INPUTS.get(shapes[first][1], f" ({shapes[first][1]} input channels)")
    label, context = shapes.get(embedding), dim(shapes, f"{level}.transformer_blocks.0.attn2.to_k.weight", 1)
    if label not in _LABELS and context is None:
        return "sdxl", f" (reduced size){note}"
    return _LABELS.get(label, "unknown"), note


MARKS: Final = Marks(
    names={
        "sdxl": "SDXL",
        "sdxl-refiner": "SDXL refiner",
    },
    groups={"sd1-sd2-sdxl": ("sdxl", "sdxl-refiner"), "sdxl-sd3": ("sdxl",)},
    networks=(
        Mark("sdxl", "single-file", ("input_blocks.0.0.weight", "label_emb.*"), kind="unet"),
        Mark(
            "sdxl", "diffusers", ("conv_in.weight", "down_blocks.*", "time_embedding.*", "add_embedding.*"), kind="unet"
        ),
    ),
    variant=_unet,
    loras=tuple(
        LoraMark(model, IN_UNET, sizes=(Width(r"_attn2_(processor_)?to_[kv]", width),))
        for model, width in {"sdxl": 2048, "sdxl-refiner": 1280}.items()
    ),
    written={
        "refiner": "sdxl-refiner",
        "sdxl|stable-diffusion-xl": "sdxl",
    },
)
