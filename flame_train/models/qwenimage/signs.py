"""The signs of Qwen-Image 2.1."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from flame_train.networks.files.signs import JOINT, Network, Shapes, Signs, down_width

_WIDTH: Final = 4096
# what no other model's layers are called, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = re.compile(
    r"(.*_)?(transformer_blocks_\d+_img_mlp_(gate_up|gate_layer|proj|out)|txt_in_(in|out)_layer)_[^_].*"
)
_IN_ATTENTION: Final = r"_transformer_blocks_\d+_attn_to_([qkv]|out_0)"


class QwenImageSigns(Signs):
    names = MappingProxyType({"qwenimage": "Qwen-Image 2.1"})
    written = (("qwen_image_2.1", "qwenimage"), ("qwen-image-2.1", "qwenimage"), ("qwen_image_2", "qwenimage"))

    def network(self, shapes: Shapes) -> Network | None:
        if "txt_in.text_norm.weight" in shapes:
            fused = "transformer_blocks.0.img_mlp.gate_up.weight" in shapes
            return Network("qwenimage", "single-file" if fused else "diffusers", "transformer", "")
        return None

    def lora(self, flat: Shapes) -> str | None:
        if any(_OWN.match(name) for name in flat):
            return "qwenimage"
        # of attention alone, SD3, Flux and Anima have other widths, or layers of a second stream
        alone = not any("_add_" in name or "_attn2_" in name for name in flat if JOINT.match(name))
        return "qwenimage" if alone and down_width(flat, _IN_ATTENTION) == _WIDTH else None
