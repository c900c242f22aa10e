"""The signs of SD3 and SD3.5."""

from __future__ import annotations

from types import MappingProxyType

from flame_train.networks.files.signs import Network, Shapes, Signs, dim, down_width, joint_width

_SIZES = ("sd3-medium", "sd35-medium", "sd35-large")


class Sd3Signs(Signs):
    names = MappingProxyType(
        {
            "sd3-medium": "SD3 medium",
            "sd35-medium": "SD3.5 medium",
            "sd35-large": "SD3.5 large",
            "sd3": "SD3 or SD3.5",
            "sdxl-sd3": "SDXL or SD3",
            "sd3-flux": "SD3 or Flux",
        }
    )
    groups = MappingProxyType(
        {
            "sd3": _SIZES,
            "sdxl-sd3": ("sdxl", "sd3", *_SIZES),
            "sd3-flux": ("sd3", *_SIZES, "flux"),
        }
    )
    written = (
        ("3.5-large", "sd35-large"),
        ("3-5-large", "sd35-large"),
        ("3.5-medium", "sd35-medium"),
        ("3-5-medium", "sd35-medium"),
        ("stable-diffusion-3-medium", "sd3-medium"),
        ("stable-diffusion-3", "sd3"),
        ("sd3", "sd3"),
    )

    def network(self, shapes: Shapes) -> Network | None:
        return _mmdit(shapes) or _diffusers_mmdit(shapes)

    def lora(self, flat: Shapes) -> str | None:
        if any("joint_blocks_" in name for name in flat):
            wide = down_width(flat, "_x_block_attn_qkv") == 2432
            medium = any("_x_block_attn2_" in name for name in flat)
            return "sd35-medium" if medium else "sd35-large" if wide else None
        width = joint_width(flat)
        if width is None:
            return None
        if any("_attn2_" in name for name in flat):
            return "sd35-medium"
        return "sd35-large" if width == 2432 else None


def _mmdit(shapes: Shapes) -> Network | None:
    width = dim(shapes, "joint_blocks.0.x_block.attn.qkv.weight", 1)
    if width is None:
        return None
    normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
    return Network(_mmdit_family(width, normed), "single-file", "transformer", "")


def _diffusers_mmdit(shapes: Shapes) -> Network | None:
    width = dim(shapes, "pos_embed.proj.weight", 0)
    if width is None or "transformer_blocks.0.attn.add_q_proj.weight" not in shapes:
        return None
    normed = "transformer_blocks.0.attn.norm_q.weight" in shapes
    return Network(_mmdit_family(width, normed), "diffusers", "transformer", "")


def _mmdit_family(width: int, normed: bool) -> str:
    if not normed:
        return "sd3-medium"
    return {2432: "sd35-large", 1536: "sd35-medium"}.get(width, "sd3")
