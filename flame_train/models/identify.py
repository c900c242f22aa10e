"""What a weights file is, told from its header alone: kind, family, layout.

The signs are the names and a few shapes that differ between published models; the first that fits wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from flame_train.io.adapter_kinds import other_kind
from flame_train.models.identify_lora import is_adapter, lora_family_of

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

STATE_PREFIXES: Final = ("values.", "optimizer.")
"""How the names in a checkpoint's optimizer file begin: exact values, and what the optimizer knows of them."""
_QUANTISED: Final = (
    (".quant_state.", "bitsandbytes' 4 bits (NF4 or FP4)"),
    (".absmax", "bitsandbytes' 4 bits (NF4 or FP4)"),
    (".SCB", "bitsandbytes' 8 bits"),
    (".comfy_quant", "ComfyUI's quantised format"),
)
"""What in a tensor's name says that the weights beside it are packed, and how."""
_NETWORK_PREFIXES: Final = ("model.diffusion_model.", "diffusion_model.", "unet/", "transformer/")
_VAE_PREFIXES: Final = ("first_stage_model.", "vae/", "vae.")

FAMILY_NAMES: Final[Mapping[str, str]] = {
    "sd1": "Stable Diffusion 1.x",
    "sd2": "Stable Diffusion 2.x",
    "sdxl": "SDXL",
    "sdxl-refiner": "SDXL refiner",
    "sd3-medium": "SD3 medium",
    "sd35-medium": "SD3.5 medium",
    "sd35-large": "SD3.5 large",
    "sd3": "SD3 or SD3.5",
    "flux-dev": "Flux.1 dev",
    "flux-schnell": "Flux.1 schnell",
    "flux-fill": "Flux.1 Fill",
    "flux-control": "Flux.1 Canny or Depth",
    "flux": "Flux.1",
    "flux2": "Flux.2",
    "chroma": "Chroma",
    "sd1-sd2-sdxl": "SD1, SD2 or SDXL",
    "sdxl-sd3": "SDXL or SD3",
    "sd3-flux": "SD3 or Flux",
    "clip-l": "CLIP-L",
    "clip-bigg": "OpenCLIP bigG",
    "clip-h": "OpenCLIP ViT-H",
    "t5-xxl": "T5-XXL",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file is. `family` is a key of FAMILY_NAMES or "unknown"; `parts` are the components it holds.

    kind: checkpoint (several components), unet, transformer, vae, text_encoder, lora, adapter (LoHa, LoKr,
    DoRA, OFT: not a plain LoRA), quantised, state (what a run is continued from) or unknown. layout: single-file,
    diffusers, openclip, transformers, kohya, peft, native or "". `detail` says it in words.
    """

    kind: str
    family: str
    layout: str
    detail: str
    parts: tuple[str, ...] = ()


def identify(shapes: Shapes, metadata: Mapping[str, str] | None = None) -> Identity:
    """What a file with these tensors is. `shapes`: name -> shape, as `open_weights(path).shapes`."""
    return _identified(tuple(shapes.items()), tuple((metadata or {}).items()))


@lru_cache(maxsize=8)  # a plan asks for the same files again and again
def _identified(tensors: tuple[tuple[str, Shape], ...], notes: tuple[tuple[str, str], ...]) -> Identity:
    shapes, metadata = dict(tensors), dict(notes)
    if shapes and all(name.startswith(STATE_PREFIXES) for name in shapes):
        words = (
            "what a flame-train run is continued from: exact values and the optimizer's state; the LoRA lies beside it"
        )
        return Identity("state", "unknown", "", words)
    if is_adapter(shapes):
        return _adapter(shapes, metadata)
    packed = next(((name, how) for sign, how in _QUANTISED for name in shapes if sign in name), None)
    if packed:
        words = f"a model whose weights are packed in {packed[1]} ({packed[0]}), from which no training starts here; "
        return Identity("quantised", "unknown", "", words + "use its bf16, fp16 or fp8 file")
    network = _stripped(shapes, _NETWORK_PREFIXES)
    found = _network(network)
    parts = _parts(shapes, found)
    if found is not None:
        family, layout, kind, note = found
        whole = kind if parts == (kind,) else "checkpoint"
        return _identity(whole, family, layout, note, parts)
    vae = _vae(_stripped(shapes, _VAE_PREFIXES))
    if vae is not None:
        return _identity("vae", *vae, "", parts)
    text = _text_encoder(shapes)
    if text is not None:
        return _identity("text_encoder", *text, "", parts)
    return Identity("unknown", "unknown", "", f"not a model that is known here ({len(shapes)} tensors)")


def could_be(family: str, wanted: str) -> bool:
    """Whether what was found does not contradict `wanted`: the same, or a name for several that includes it."""
    groups = {
        "unknown": FAMILY_NAMES,
        "sdxl-sd3": ("sdxl", "sd3", "sd3-medium", "sd35-medium", "sd35-large"),
        "sd1-sd2-sdxl": ("sd1", "sd2", "sdxl", "sdxl-refiner"),
        "sd3": ("sd3-medium", "sd35-medium", "sd35-large"),
        "sd3-flux": ("sd3", "sd3-medium", "sd35-medium", "sd35-large", "flux"),
        "flux": ("flux-dev", "flux-schnell", "flux-fill", "flux-control"),
    }
    return family == wanted or wanted in groups.get(family, ()) or family in groups.get(wanted, ())


def _identity(kind: str, family: str, layout: str, note: str, parts: tuple[str, ...]) -> Identity:
    words = f"{FAMILY_NAMES.get(family, 'unknown')}{note}, {kind.replace('_', ' ')}, {layout} layout"
    if kind == "checkpoint":
        words += f" ({', '.join(part.replace('_', ' ') for part in parts)})"
    return Identity(kind, family, layout, words, parts)


def _adapter(shapes: Shapes, metadata: Mapping[str, str]) -> Identity:
    other = other_kind(shapes)
    family, layout = lora_family_of(shapes, metadata)
    name = FAMILY_NAMES.get(family, "a model that is not known here")
    if other:
        return Identity("adapter", family, layout, f"{other} for {name}; not a plain LoRA")
    naming = "diffusers" if layout == "peft" else layout  # as `convert` and output.format call it
    return Identity("lora", family, layout, f"LoRA for {name}, {naming} names")


def _stripped(shapes: Shapes, prefixes: Iterable[str]) -> Shapes:
    """The tensors below the first prefix that occurs, without it; all of them when none does."""
    for prefix in prefixes:
        found = {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}
        if found:
            return found
    return shapes


_Network = tuple[str, str, str, str]  # family, layout, kind, note


def _network(shapes: Shapes) -> _Network | None:
    tests: tuple[Callable[[Shapes], _Network | None], ...] = (
        _ldm_unet,
        _mmdit,
        _flux,
        _diffusers_unet,
        _diffusers_flux,
        _diffusers_mmdit,
    )
    return next((found for test in tests if (found := test(shapes)) is not None), None)


def _ldm_unet(shapes: Shapes) -> _Network | None:
    first = shapes.get("input_blocks.0.0.weight")
    if first is None or len(first) != 4:
        return None
    note = {4: "", 8: " (edit)", 9: " (inpainting)"}.get(first[1], f" ({first[1]} input channels)")
    context = _dim(shapes, "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", 1)
    family, size = _unet_family(shapes.get("label_emb.0.0.weight"), context)
    return family, "single-file", "unet", size + note


def _diffusers_unet(shapes: Shapes) -> _Network | None:
    if "conv_in.weight" not in shapes or not any(name.startswith("down_blocks.") for name in shapes):
        return None
    if not any(name.startswith("time_embedding.") for name in shapes):
        return None
    note = {4: "", 9: " (inpainting)"}.get(shapes["conv_in.weight"][1], "")
    context = _dim(shapes, "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight", 1)
    family, size = _unet_family(shapes.get("add_embedding.linear_1.weight"), context)
    return family, "diffusers", "unet", size + note


def _unet_family(label: Shape | None, context: int | None) -> tuple[str, str]:
    """`label`: shape of the weight that embeds sizes; `context`: text width at the first level, if it attends."""
    if label is None:
        return {768: "sd1", 1024: "sd2"}.get(context or 0, "unknown"), ""
    if label == (1536, 2560):
        return "sdxl-refiner", ""
    if label == (1280, 2816):
        return "sdxl", ""
    return ("sdxl", " (reduced size)") if context is None else ("unknown", "")


def _mmdit(shapes: Shapes) -> _Network | None:
    width = _dim(shapes, "joint_blocks.0.x_block.attn.qkv.weight", 1)
    if width is None:
        return None
    normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
    return _mmdit_family(width, normed), "single-file", "transformer", ""


def _diffusers_mmdit(shapes: Shapes) -> _Network | None:
    width = _dim(shapes, "pos_embed.proj.weight", 0)
    if width is None or "transformer_blocks.0.attn.add_q_proj.weight" not in shapes:
        return None
    normed = "transformer_blocks.0.attn.norm_q.weight" in shapes
    return _mmdit_family(width, normed), "diffusers", "transformer", ""


def _mmdit_family(width: int, normed: bool) -> str:
    if not normed:
        return "sd3-medium"
    return {2432: "sd35-large", 1536: "sd35-medium"}.get(width, "sd3")


def _flux(shapes: Shapes) -> _Network | None:
    if "single_stream_modulation.lin.weight" in shapes:
        return "flux2", "single-file", "transformer", ""
    if "double_blocks.0.img_attn.norm.key_norm.scale" not in shapes:
        return None
    if any(name.startswith("distilled_guidance_layer.") for name in shapes):
        return "chroma", "single-file", "transformer", ""
    guided = "guidance_in.in_layer.weight" in shapes
    return _flux_family(guided, _dim(shapes, "img_in.weight", 1)), "single-file", "transformer", ""


def _diffusers_flux(shapes: Shapes) -> _Network | None:
    if "single_transformer_blocks.0.attn.to_q.weight" not in shapes:
        return None
    guided = any(name.startswith("time_text_embed.guidance_embedder.") for name in shapes)
    family = _flux_family(guided, _dim(shapes, "x_embedder.weight", 1))
    return family, "diffusers", "transformer", ""


def _flux_family(guided: bool, inputs: int | None) -> str:
    if inputs in (128, 384):
        return {128: "flux-control", 384: "flux-fill"}[inputs]
    return "flux-dev" if guided else "flux-schnell"


def _vae(shapes: Shapes) -> tuple[str, str] | None:
    """Family and layout. VAEs of one latent width differ in values only."""
    first = shapes.get("decoder.conv_in.weight")
    if first is None or len(first) != 4:
        return None
    family = {4: "sd1-sd2-sdxl", 16: "sd3-flux"}.get(first[1], "unknown")
    layout = "diffusers" if any(name.startswith("decoder.up_blocks.") for name in shapes) else "single-file"
    return family, layout


def _text_encoder(shapes: Shapes) -> tuple[str, str] | None:
    for name, shape in shapes.items():
        if name.endswith("embeddings.token_embedding.weight") and len(shape) == 2:
            return _clip(shape[1]), "transformers"
    for name, shape in shapes.items():
        if name.endswith("token_embedding.weight") and len(shape) == 2:
            return _clip(shape[1]), "openclip"
    for name, shape in shapes.items():
        if name.endswith(("shared.weight", "encoder.embed_tokens.weight")) and shape == (32128, 4096):
            return "t5-xxl", "transformers"
    return None


def _clip(width: int) -> str:
    return {768: "clip-l", 1280: "clip-bigg", 1024: "clip-h"}.get(width, "unknown")


def _parts(shapes: Shapes, network: _Network | None) -> tuple[str, ...]:
    """The components in the file, by the prefixes that full checkpoints and diffusers folders use."""
    found = [] if network is None else [network[2]]
    if _vae(_stripped(shapes, _VAE_PREFIXES)) is not None:
        found.append("vae")
    signs = {
        "text_encoder": ("text_encoder/", "conditioner.embedders.0.", "cond_stage_model.", "text_encoders.clip_l."),
        "text_encoder_2": ("text_encoder_2/", "conditioner.embedders.1.", "text_encoders.clip_g."),
        "text_encoder_3": ("text_encoder_3/", "text_encoders.t5xxl."),
    }
    found += [part for part, starts in signs.items() if any(name.startswith(starts) for name in shapes)]
    if not found and _text_encoder(shapes) is not None:
        found.append("text_encoder")
    if network is not None and network[0].startswith("flux"):  # T5 is the second of two there
        found = list(dict.fromkeys("text_encoder_2" if part == "text_encoder_3" else part for part in found))
    return tuple(found)


def _dim(shapes: Shapes, name: str, axis: int) -> int | None:
    shape = shapes.get(name, ())
    return shape[axis] if len(shape) > axis else None
