"""The signs of Chroma, Flux.1's blocks beside the network that modulates them, and of its relative Radiance."""

from __future__ import annotations

from types import MappingProxyType

from flame_train.networks.files.signs import Network, Shapes, Signs


class ChromaSigns(Signs):
    names = MappingProxyType({"chroma": "Chroma", "chroma-radiance": "Chroma1 Radiance, which works on pixels"})
    groups = MappingProxyType({"sd3-flux": ("chroma",)})  # whose VAE is Flux.1's
    also_reads = MappingProxyType({"chroma": ("flux",)})  # its blocks have Flux.1's names, so a LoRA may be either's
    t5 = "text_encoder"

    def network(self, shapes: Shapes) -> Network | None:
        if not any(name.startswith("distilled_guidance_layer.") for name in shapes):
            return None
        if any(name.startswith("nerf_") for name in shapes):
            return Network("chroma-radiance", "single-file", "transformer", "")
        if "single_transformer_blocks.0.attn.to_q.weight" in shapes:
            return Network("chroma", "diffusers", "transformer", "")
        native = any(name.startswith("double_blocks.0.") for name in shapes)
        return Network("chroma", "single-file", "transformer", "") if native else None

    def lora(self, flat: Shapes) -> str | None:
        return "chroma" if any("distilled_guidance_layer_" in name for name in flat) else None
