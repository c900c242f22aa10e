"""The signs of Krea 2."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from flame_train.networks.files.signs import Network, Shapes, Signs, down_width, up_rows

# layers that no other model has, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = re.compile(
    r"(.*_)?((transformer_)?blocks_\d+_(attn_(w[qkvo]|gate|to_gate)|(mlp|ff)_(gate|up|down))|txtfusion_.*|text_fusion_.*"
    r"|tmlp_[02]|tproj_1|txtmlp_[13]|time_mod_proj)_[^_].*"
)


class Krea2Signs(Signs):
    names = MappingProxyType({"krea2": "Krea 2"})
    groups = MappingProxyType({"qwen-wan": ("krea2",)})
    written = (("krea-2", "krea2"), ("krea2", "krea2"), ("krea 2", "krea2"))

    def network(self, shapes: Shapes) -> Network | None:
        for sign, layout in (("txtfusion.", "single-file"), ("text_fusion.", "diffusers")):
            if f"{sign}projector.weight" in shapes:
                return Network("krea2", layout, "transformer", "")
        return None

    def lora(self, flat: Shapes) -> str | None:
        return "krea2" if any(_OWN.match(name) for name in flat) or _grouped(flat) else None


def _grouped(flat: Shapes) -> bool:
    """Whether four heads of queries share one of keys and values, in a file that has both in diffusers' layout."""
    width = down_width(flat, r"_transformer_blocks_\d+_attn_to_[kv]")
    rows = up_rows(flat, r"_transformer_blocks_\d+_attn_to_[kv]") or 0
    return width is not None and rows * 4 == width
