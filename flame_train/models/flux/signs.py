"""The signs of Flux.1."""

from __future__ import annotations

from types import MappingProxyType

from flame_train.networks.files.signs import Network, Shapes, Signs, dim, joint_width


class FluxSigns(Signs):
    names = MappingProxyType(
        {
            "flux-dev": "Flux.1 dev",
            "flux-schnell": "Flux.1 schnell",
            "flux-fill": "Flux.1 Fill",
            "flux-control": "Flux.1 Canny or Depth",
            "flux": "Flux.1",
        }
    )
    groups = MappingProxyType({"flux": ("flux-dev", "flux-schnell", "flux-fill", "flux-control")})
    # sd-scripts writes both down for Chroma
    written = (("chroma", "chroma"), ("flux", "flux"))
    t5 = "text_encoder_2"

    def network(self, shapes: Shapes) -> Network | None:
        if any(name.startswith("distilled_guidance_layer.") for name in shapes):
            return None  # Chroma
        return _flux(shapes) or _diffusers_flux(shapes)

    def lora(self, flat: Shapes) -> str | None:
        def has(part: str) -> bool:
            return any(part in name for name in flat)

        if has("double_blocks_") or has("single_blocks_") or has("single_transformer_blocks_"):
            return "flux"
        return "flux" if not has("_attn2_") and joint_width(flat) == 3072 else None


def _flux(shapes: Shapes) -> Network | None:
    if "double_blocks.0.img_attn.norm.key_norm.scale" not in shapes or "single_stream_modulation.lin.weight" in shapes:
        return None
    guided = "guidance_in.in_layer.weight" in shapes
    return Network(_flux_family(guided, dim(shapes, "img_in.weight", 1)), "single-file", "transformer", "")


def _diffusers_flux(shapes: Shapes) -> Network | None:
    if "single_transformer_blocks.0.attn.to_q.weight" not in shapes:
        return None
    if "early_stream_modulations.image.linear.weight" in shapes:
        return None  # FLUX.3
    guided = any(name.startswith("time_text_embed.guidance_embedder.") for name in shapes)
    family = _flux_family(guided, dim(shapes, "x_embedder.weight", 1))
    return Network(family, "diffusers", "transformer", "")


def _flux_family(guided: bool, inputs: int | None) -> str:
    if inputs in (128, 384):
        return {128: "flux-control", 384: "flux-fill"}[inputs]
    return "flux-dev" if guided else "flux-schnell"
