"""Names of Stable Diffusion 1 and 2: components, layouts, and how LoRA files call every module.

sd-scripts trains diffusers' UNet, so its files name modules by diffusers' paths.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import resolve
from flame_train.io.weights import open_weights
from flame_train.models.sdxl.names_unet import (
    ALPHA_LOST,
    IN_UNET,
    SD_LEVELS,
    SD_MODULES,
    UNET_COMPONENT,
    unet_from_diffusers,
)
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks, Shapes, Width, dim
from flame_train.networks.vae.names import VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip import names as clip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder

_ELSEWHERE: Final = re.compile(
    r"denoiser\.(log_)?sigmas|model_ema\..*|cond_stage_model\.(logit_scale|text_projection.*)|global_step"
    r"|v_pred|ztsnr|betas|alphas_cumprod(_prev)?|(log_)?(one_minus|sqrt|posterior).*"
)


COMPONENTS: Final = (
    UNET_COMPONENT,
    VAE,
    clip.clip_alone(),
)


@lru_cache(maxsize=4)
def lora_family(v2: bool, v: bool, /) -> LoraFamily:
    """Returns how LoRA files name the modules of Stable Diffusion 1, or of 2, which predicts noise or `v`."""
    unet = modules_by_table(SD_MODULES, unet_from_diffusers(SD_LEVELS).inverse)
    text = modules_as_they_are(clip.CLIP_H_MODULES if v2 else clip.CLIP_L_MODULES)
    encoder = f"text_encoders.clip_{'h' if v2 else 'l'}.transformer."
    return LoraFamily(
        name="sd15",
        components=(
            LoraComponent(
                "unet",
                "lora_unet",
                unet,
                ("diffusion_model.", "model.diffusion_model.", ""),
                ("lycoris",),
                alpha_lost=ALPHA_LOST,
                kohya_paths="diffusers",
            ),
            LoraComponent("text_encoder", "lora_te", text, (encoder,), ("lora_te1",), alpha_lost=ALPHA_LOST),
        ),
        base_version=f"sd_v{2 if v2 else 1}{'_v' if v else ''}",
        architecture=f"stable-diffusion-{('v2-768-v' if v else 'v2-512') if v2 else 'v1'}/lora",
        implementation="diffusers",
        resolution="768x768" if v2 and v else "512x512",
        several_predictions=True,
    )


def lora_family_of(shapes: Shapes) -> LoraFamily:
    """Returns the names of the model that a LoRA file with these tensors was made for, by the width of its text."""
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    return lora_family(any(width.fits(flat) for width in _SECOND), False)


_NETWORKS: Final = built_by(
    unet=(UNet, UNetArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.sd())),
    text_encoder=(ClipTextEncoder, ClipArch.from_shapes),
)
_ALONE: Final = {"clip-l": "text_encoder", "clip-h": "text_encoder"}
SD15_FILES: Final = FamilyFiles("sd15", COMPONENTS, _ALONE, _NETWORKS, partial(resolve, idle=_ELSEWHERE))

_DEVIATION: Final = 0.09
"""Above it the telltale of a Stable Diffusion 2 is of one that predicts v, as ComfyUI has it (supported_models.py)."""
_TELLTALES: Final = (
    ("output_blocks.11.1.transformer_blocks.0.norm1.bias", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"),
    (
        "up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias",
        "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight",
    ),
)
"""The telltale, and what is as wide as the text, in single files and as diffusers has them."""


def looks_like_v(base: Path) -> bool:
    """Says whether the UNet in a file or folder is a Stable Diffusion 2's that seems to predict v."""
    with open_weights(base) as weights:
        for prefix, (telltale, text) in product((*UNET_COMPONENT.prefixes, ""), _TELLTALES):
            if prefix + telltale in weights.names and dim(weights.shapes, prefix + text, 1) == 1024:
                return float(np.std(weights.read(prefix + telltale).astype(np.float32))) > _DEVIATION
    return False


_OTHERS: Final = {4: "", 5: " (depth)", 7: " (upscaler)", 8: " (InstructPix2Pix)", 9: " (inpainting)"}
_PLACES: Final = (("input_blocks.0.0.weight", "input_blocks.1.1"), ("conv_in.weight", "down_blocks.0.attentions.0"))


def _unet(model: str, shapes: Shapes) -> tuple[str, str] | None:
    """Says which UNet it is, by its input and by the text's width at the first level."""
    first, level = next(places for places in _PLACES if places[0] in shapes)
    if len(shapes[first]) != 4:
        return None
    note = _OTHERS.get(shapes[first][1], f" ({shapes[first][1]} input channels)")
    context = dim(shapes, f"{level}.transformer_blocks.0.attn2.to_k.weight", 1)
    if context is None:
        return "unknown", note
    if known := {768: "sd1", 1024: "sd2"}.get(context):
        return known, note
    linear = len(shapes.get(f"{level}.proj_in.weight", ())) == 2
    return "sd2" if linear else "sd1", f" (reduced size){note}"


_FIRST_LEVEL: Final = r"(down_blocks_0|up_blocks_3)_attentions_|input_blocks_[12]_1_|output_blocks_(9|10|11)_1_"
_TEXT: Final = r"_attn2_(processor_)?to_[kv]"
_ENCODER: Final = r"text_model_encoder_layers_\d+_self_attn_[qkv]_proj"
_SECOND: Final = Width(_TEXT, 1024), Width(_ENCODER, 1024)
MARKS: Final = Marks(
    names={
        "sd1": "Stable Diffusion 1.x",
        "sd2": "Stable Diffusion 2.x",
        "sd15": "Stable Diffusion 1.x or 2.x",
    },
    groups={"sd15": ("sd1", "sd2"), "sd1-sd2-sdxl": ("sd15", "sd1", "sd2")},
    networks=(
        Mark("sd15", "single-file", ("input_blocks.0.0.weight",), ("label_emb.*",), "unet"),
        Mark(
            "sd15", "diffusers", ("conv_in.weight", "down_blocks.*", "time_embedding.*"), ("add_embedding.*",), "unet"
        ),
    ),
    variant=_unet,
    loras=(
        LoraMark("sd1", IN_UNET, sizes=(Width(_TEXT, 768),)),
        LoraMark("sd2", IN_UNET, sizes=(Width(_TEXT, 1024),)),
        LoraMark("sd2", "^lora_te_", sizes=(Width(_ENCODER, 1024),)),
        LoraMark("sd15", _FIRST_LEVEL, lacks=_TEXT),
    ),
    written={"stable-diffusion-v2|sd_v2": "sd2", "stable-diffusion-v1|sd_v1": "sd1"},
)
