"""The signs of Qwen-Image 1."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from flame_train.networks.files.signs import Network, Shapes, Signs

# what no other model's layers are called, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = re.compile(r"(.*_)?transformer_blocks_\d+_((img|txt)_mlp_net|(img|txt)_mod)_[^_].*")


class QwenImage1Signs(Signs):
    names = MappingProxyType({"qwenimage1": "Qwen-Image 1"})
    groups = MappingProxyType({"qwen-wan": ("qwenimage1",)})
    # a LoRA of attention alone has the names and the width of one of Flux.1's, in diffusers' layout
    also_reads = MappingProxyType({"qwenimage1": ("flux",)})
    written = (("qwen_image", "qwenimage1"), ("qwen-image", "qwenimage1"))

    def network(self, shapes: Shapes) -> Network | None:
        if "txt_norm.weight" in shapes and "transformer_blocks.0.img_mod.1.weight" in shapes:
            return Network("qwenimage1", "diffusers", "transformer", "")
        return None

    def lora(self, flat: Shapes) -> str | None:
        return "qwenimage1" if any(_OWN.match(name) for name in flat) else None
