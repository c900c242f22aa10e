"""Which family an adapter file belongs to, from its names, a few shapes, and its metadata as a last resort."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from flame_train.io.adapter_kinds import other_kind

Shapes = Mapping[str, tuple[int, ...]]

_LORA_ENDS: Final = re.compile(
    r".*(\.lora_(down|up)\.weight|\.lora_[AB](\.[^.]+)?\.weight|[._](lora|lora_linear_layer)\.(down|up)\.weight)"
)
_SAME_NAMES: Final = {("flux", "chroma")}  # of what the names say, and what the metadata then makes of it
# the layouts of published single files, below their prefix or without one
_NATIVE: Final = ("diffusion_model.", "model.diffusion_model.", "double_blocks.", "single_blocks.", "joint_blocks.")
_CONTEXT_WIDTH: Final = {768: "sd1", 1024: "sd2", 2048: "sdxl", 1280: "sdxl-refiner"}
# how the names of both matrices end in any dialect, every dot made an underscore
_DOWN: Final = r".*%s_(lora_down|lora_A|lora_A_default|lora_linear_layer_down)_weight"
_UP: Final = r".*%s_(lora_up|lora_B|lora_B_default|lora_linear_layer_up)_weight"
# a block of joint attention in diffusers' layout, and its layers whose input is as wide as the model
_JOINT: Final = re.compile(r"(base_model_model_|lora_|lycoris_)?(transformer_)?transformer_blocks_\d+_")
_AS_WIDE: Final = (
    "_(attn_(to_[qkv]|add_[qkv]_proj|to_out_0|to_add_out)|ff_(context_)?net_0_proj|norm1_(context_)?linear)"
)
# signs in what trainers write down about the base model, the narrower before the wider
_WRITTEN: Final = (
    ("refiner", "sdxl-refiner"),
    ("chroma", "chroma"),
    ("sdxl", "sdxl"),
    ("stable-diffusion-xl", "sdxl"),
    ("flux", "flux"),
    ("3.5-large", "sd35-large"),
    ("3-5-large", "sd35-large"),
    ("3.5-medium", "sd35-medium"),
    ("3-5-medium", "sd35-medium"),
    ("stable-diffusion-3-medium", "sd3-medium"),
    ("stable-diffusion-3", "sd3"),
    ("sd3", "sd3"),
    ("stable-diffusion-v2", "sd2"),
    ("sd_v2", "sd2"),
    ("stable-diffusion-v1", "sd1"),
    ("sd_v1", "sd1"),
)


def is_adapter(shapes: Shapes) -> bool:
    """True for a LoRA or one of its relatives."""
    return other_kind(shapes) is not None or any(_LORA_ENDS.fullmatch(name) for name in shapes)


def lora_family_of(shapes: Shapes, metadata: Mapping[str, str]) -> tuple[str, str]:
    """Family (a key of `identify.FAMILY_NAMES`, or "unknown") and layout ("kohya", "peft" or "native").

    Every name is looked at with its dots made underscores, so that a sign is sought once for all dialects.
    """
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    named, written = _by_names(flat), _by_metadata(metadata)
    family = written if (named, written) in _SAME_NAMES else named or written or _by_part(flat)
    return family or "unknown", _layout(shapes)


def _layout(shapes: Shapes) -> str:
    if any(name.startswith(("lora_unet_", "lora_te", "lora_transformer_", "lycoris_")) for name in shapes):
        return "kohya"
    return "native" if any(name.startswith(_NATIVE) for name in shapes) else "peft"


def _by_names(flat: Shapes) -> str | None:
    """What names and shapes prove; None where they leave several families possible."""

    def has(part: str) -> bool:
        return any(part in name for name in flat)

    if has("distilled_guidance_layer_"):
        return "chroma"
    if has("_attn_to_qkv_mlp_proj") or _gated(flat):
        return "flux2"
    if has("double_blocks_") or has("single_blocks_") or has("single_transformer_blocks_"):
        return "flux"
    if has("joint_blocks_"):
        wide = _down_width(flat, "_x_block_attn_qkv") == 2432
        return "sd35-medium" if has("_x_block_attn2_") else "sd35-large" if wide else None
    if any(_JOINT.match(name) for name in flat):
        width = _down_width(flat, _AS_WIDE) or (_down_width(flat, "_ff_(context_)?net_2") or 0) // 4
        return "sd35-medium" if has("_attn2_") else {3072: "flux", 2432: "sd35-large"}.get(width)
    return _CONTEXT_WIDTH.get(_down_width(flat, "_attn2_(processor_)?to_[kv]") or 0)


def _gated(flat: Shapes) -> bool:
    """Whether single-stream blocks begin as Flux.2's: 3 widths of queries, keys and values, 6 of a gated MLP."""
    layer = r"single_blocks_\d+_linear1"
    rows, width = _first(flat, _UP % layer, 0), _down_width(flat, layer)
    return rows is not None and width is not None and rows == 9 * width


def _down_width(flat: Shapes, module: str) -> int | None:
    """The input width of the first down matrix of a module whose path ends as the pattern `module` says."""
    return _first(flat, _DOWN % module, 1)


def _first(flat: Shapes, name: str, axis: int) -> int | None:
    """The size along `axis` of the first matrix whose name fits the pattern."""
    pattern = re.compile(name)
    return next((shape[axis] for own, shape in flat.items() if len(shape) > 1 and pattern.fullmatch(own)), None)


def _by_metadata(metadata: Mapping[str, str]) -> str | None:
    written = f"{metadata.get('ss_base_model_version', '')} {metadata.get('modelspec.architecture', '')}".lower()
    return next((family for sign, family in _WRITTEN if sign in written), None)


def _by_part(flat: Shapes) -> str:
    """The narrowest thing that can be said when several families are possible."""
    starts = {name.partition("_text_model")[0] for name in flat}
    if any("joint_blocks_" in name or _JOINT.match(name) for name in flat):
        return "sd3"
    if {"lora_te2", "text_encoder_2"} & starts:
        return "sdxl-sd3"
    return "sd1" if "lora_te" in starts else "unknown"
