"""The signs of Z-Image, and of its relative Lumina 2."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from flame_train.networks.files.signs import Network, Shapes, Signs, down_width

# a layer of a block, its path's dots made underscores, behind any trainer's prefix
_BLOCK: Final = re.compile(r"(.*_)?(layers|noise_refiner|context_refiner)_\d+_(attention|feed_forward|adaLN)_")
_LUMINA_WIDTH: Final = 2304


class ZImageSigns(Signs):
    names = MappingProxyType({"zimage": "Z-Image", "lumina2": "Lumina 2"})
    groups = MappingProxyType({"sd3-flux": ("zimage",)})  # whose VAE is Flux.1's
    written = (("z-image", "zimage"), ("zimage", "zimage"), ("lumina", "lumina2"))

    def network(self, shapes: Shapes) -> Network | None:
        if "noise_refiner.0.attention.qkv.weight" in shapes:
            family = "zimage" if "cap_pad_token" in shapes else "lumina2"
            return Network(family, "single-file", "transformer", "")
        if "noise_refiner.0.attention.to_q.weight" in shapes and "all_x_embedder.2-1.weight" in shapes:
            return Network("zimage", "diffusers", "transformer", "")
        return None

    def lora(self, flat: Shapes) -> str | None:
        if not any(_BLOCK.match(name) for name in flat):
            return None
        return "lumina2" if down_width(flat, "_feed_forward_w[13]") == _LUMINA_WIDTH else "zimage"
