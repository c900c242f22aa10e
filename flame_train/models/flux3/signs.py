"""The signs of FLUX.3 klein."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from flame_train.networks.files.signs import Network, Shapes, Signs

# layers that no other model has, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = re.compile(
    r"(.*_)?((content_)?mode_blocks_image(_cond)?_\d+|txt_mode_blocks_\d+"
    r"|single_blocks_\d+_([qkv]_proj|attn_out|mlp_(in|out))"
    r"|single_transformer_blocks_\d+_(attn_to_out_0|ff_linear_(in|out))"
    r"|(early|single)_stream_modulations_(image|image_cond|txt))_.*"
)


class Flux3Signs(Signs):
    names = MappingProxyType({"flux3": "FLUX.3 klein"})
    groups = MappingProxyType({"flux2-flux3": ("flux3",)})  # whose VAE is FLUX.2's
    # a LoRA of the joint blocks' queries, keys and values alone has Flux.1's width, and its names in diffusers' layout
    also_reads = MappingProxyType({"flux3": ("flux",)})
    written = (("flux3", "flux3"), ("flux.3", "flux3"), ("flux-3", "flux3"))

    def network(self, shapes: Shapes) -> Network | None:
        for end, layout, told in (
            ("lin.weight", "single-file", "ref_time_in.in_layer.weight"),
            ("linear.weight", "diffusers", "target_timestep_embedder.linear_1.weight"),
        ):
            if f"early_stream_modulations.image.{end}" in shapes:
                note = ", distilled to few steps" if told in shapes else ""
                return Network("flux3", layout, "transformer", note)
        return None

    def lora(self, flat: Shapes) -> str | None:
        return "flux3" if any(_OWN.match(name) for name in flat) else None
