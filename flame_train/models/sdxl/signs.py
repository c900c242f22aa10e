"""The signs of SDXL, and of its relatives with UNets: SD1, SD2 and SDXL's refiner."""

from __future__ import annotations

from types import MappingProxyType

from flame_train.networks.files.signs import Network, Shape, Shapes, Signs, dim, down_width

_CONTEXT_WIDTH = {768: "sd1", 1024: "sd2", 2048: "sdxl", 1280: "sdxl-refiner"}


class SdxlSigns(Signs):
    names = MappingProxyType(
        {
            "sd1": "Stable Diffusion 1.x",
            "sd2": "Stable Diffusion 2.x",
            "sdxl": "SDXL",
            "sdxl-refiner": "SDXL refiner",
            "sd1-sd2-sdxl": "SD1, SD2 or SDXL",
        }
    )
    groups = MappingProxyType({"sd1-sd2-sdxl": ("sd1", "sd2", "sdxl", "sdxl-refiner")})
    written = (
        ("refiner", "sdxl-refiner"),
        ("sdxl", "sdxl"),
        ("stable-diffusion-xl", "sdxl"),
        ("stable-diffusion-v2", "sd2"),
        ("sd_v2", "sd2"),
        ("stable-diffusion-v1", "sd1"),
        ("sd_v1", "sd1"),
    )

    def network(self, shapes: Shapes) -> Network | None:
        return _ldm_unet(shapes) or _diffusers_unet(shapes)

    def lora(self, flat: Shapes) -> str | None:
        return _CONTEXT_WIDTH.get(down_width(flat, "_attn2_(processor_)?to_[kv]") or 0)


def _ldm_unet(shapes: Shapes) -> Network | None:
    first = shapes.get("input_blocks.0.0.weight")
    if first is None or len(first) != 4:
        return None
    note = {4: "", 8: " (edit)", 9: " (inpainting)"}.get(first[1], f" ({first[1]} input channels)")
    context = dim(shapes, "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1)
    family, size = _unet_family(shapes.get("label_emb.0.0.weight"), context)
    return Network(family, "single-file", "unet", size + note)


def _diffusers_unet(shapes: Shapes) -> Network | None:
    if "conv_in.weight" not in shapes or not any(name.startswith("down_blocks.") for name in shapes):
        return None
    if not any(name.startswith("time_embedding.") for name in shapes):
        return None
    note = {4: "", 9: " (inpainting)"}.get(shapes["conv_in.weight"][1], "")
    context = dim(shapes, "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight", 1)
    family, size = _unet_family(shapes.get("add_embedding.linear_1.weight"), context)
    return Network(family, "diffusers", "unet", size + note)


def _unet_family(label: Shape | None, context: int | None) -> tuple[str, str]:
    """`label`: shape of the weight that embeds sizes; `context`: text width at the first level, if it attends."""
    if label is None:
        return {768: "sd1", 1024: "sd2"}.get(context or 0, "unknown"), ""
    if label == (1536, 2560):
        return "sdxl-refiner", ""
    if label == (1280, 2816):
        return "sdxl", ""
    return ("sdxl", " (reduced size)") if context is None else ("unknown", "")
