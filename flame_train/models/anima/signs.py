"""The signs of Anima, and of its relative Cosmos-Predict2."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from flame_train.networks.files.signs import JOINT, Network, Shapes, Signs, down_width

# a layer of a block, its path's dots made underscores, behind any trainer's prefix
_BLOCK: Final = re.compile(
    r"(.*_)?(?<!transformer_)blocks_\d+_((self|cross)_attn_(q|k|v|output)_proj|adaln_modulation_\w+_[12]|mlp_layer[12])_"
)
_ADAPTER: Final = re.compile(r"(.*_)?(llm_adapter|text_conditioner)_(blocks_\d+|out_proj)_")
_TEXT_WIDTH: Final = 1024


class AnimaSigns(Signs):
    names = MappingProxyType({"anima": "Anima", "cosmos2": "Cosmos-Predict2"})
    groups = MappingProxyType({"qwen-wan": ("anima",)})  # whose VAE is Qwen-Image's
    written = (("anima", "anima"),)

    def network(self, shapes: Shapes) -> Network | None:
        if "blocks.0.adaln_modulation_self_attn.1.weight" in shapes:
            family = "anima" if "llm_adapter.out_proj.weight" in shapes else "cosmos2"
            return Network(family, "single-file", "transformer", "")
        if "transformer_blocks.0.norm1.linear_1.weight" in shapes and "time_embed.norm.weight" in shapes:
            return Network("anima", "diffusers", "transformer", "")
        return None

    def lora(self, flat: Shapes) -> str | None:
        if any(_BLOCK.match(name) or _ADAPTER.match(name) for name in flat):
            return "anima"
        joint = [name for name in flat if JOINT.match(name)]
        of_text = down_width(flat, "_attn2_to_[kv]")
        own = any("_attn1_" in name or "_norm3_linear_" in name for name in joint)
        return "anima" if joint and (own or of_text == _TEXT_WIDTH) else None
