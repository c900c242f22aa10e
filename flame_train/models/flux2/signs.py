"""The signs of FLUX.2 klein, and of its relative FLUX.2 dev."""

from __future__ import annotations

from types import MappingProxyType

from flame_train.networks.files.signs import Network, Shapes, Signs, down_width, up_rows


class Flux2Signs(Signs):
    names = MappingProxyType({"flux2": "FLUX.2 klein", "flux2-dev": "FLUX.2 dev", "flux2-flux3": "FLUX.2 or FLUX.3"})
    groups = MappingProxyType({"flux2-flux3": ("flux2", "flux2-dev")})
    written = (("flux2", "flux2"), ("flux.2", "flux2"), ("flux-2", "flux2"))

    def network(self, shapes: Shapes) -> Network | None:
        for sign, layout, guidance in (
            ("single_stream_modulation.lin.weight", "single-file", "guidance_in."),
            ("single_stream_modulation.linear.weight", "diffusers", "time_guidance_embed.guidance_embedder."),
        ):
            if sign in shapes:
                dev = any(name.startswith(guidance) for name in shapes)
                return Network("flux2-dev" if dev else "flux2", layout, "transformer", "")
        return None

    def lora(self, flat: Shapes) -> str | None:
        fused = any("_attn_to_qkv_mlp_proj" in name or "_ff_linear_in" in name for name in flat)
        return "flux2" if fused or _gated(flat) else None


def _gated(flat: Shapes) -> bool:
    """Whether MLPs begin as Flux.2's: with 6 widths for gate and value, in single blocks beside 3 for the attention."""
    for layer, widths in ((r"single_blocks_\d+_linear1", 9), (r"double_blocks_\d+_(img|txt)_mlp_0", 6)):
        rows, width = up_rows(flat, layer), down_width(flat, layer)
        if rows is not None and width is not None and rows == widths * width:
            return True
    return False
