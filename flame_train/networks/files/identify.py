"""Identifies a weights file or a LoRA by its header alone: kind, family, layout.

Names and a few shapes differ between published models: each family declares the marks that it is told by.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from flame_train.families import FAMILY_TITLES
from flame_train.io.lora_names import other_kind, read_kind, remedy, without_place
from flame_train.networks.files.marks import JOINT, Mark, Marks, Shape, Shapes

_LORA_ENDS: Final = re.compile(
    r".*(\.lora_(down|up)\.weight|\.lora_[AB](\.[^.]+)?\.weight|[._](lora|lora_linear_layer)\.(down|up)\.weight"
    r"|\.hada_w[12]_[ab]|\.lokr_w[12](_[ab])?)"
)
# the layouts of published single files, below their prefix or without one
_NATIVE: Final = (
    *("diffusion_model.", "model.diffusion_model.", "double_blocks.", "single_blocks.", "joint_blocks."),
    *("input_blocks.", "middle_block.", "output_blocks."),
)


def is_adapter(shapes: Shapes) -> bool:
    """Says whether it is a LoRA or one of its relatives."""
    refused = other_kind(shapes) or without_place(shapes)
    return refused is not None or any(_LORA_ENDS.fullmatch(name) for name in shapes)


def lora_family_of(shapes: Shapes, metadata: Mapping[str, str], every: Sequence[Marks]) -> tuple[str, str]:
    """Returns family (a key of `identify.model_names()`, or "unknown") and layout ("kohya", "peft" or "native").

    Dots of names become underscores, so that one mark serves all naming schemes. The metadata decide where names prove
    nothing, or are also those of the model that is written down.
    """
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    lines = "\n".join(flat)
    text = f"{metadata.get('ss_base_model_version', '')} {metadata.get('modelspec.architecture', '')}".lower()
    named = _one(marks.lora(flat, lines) for marks in every)
    written = _one(marks.by_metadata(text) for marks in every)
    same = any(named in marks.also_reads.get(written or "", ()) for marks in every)
    family = written if same else named or written or _by_part(flat)
    return family or "unknown", _layout(shapes)


def _one(found: Iterable[str | None]) -> str | None:
    """Returns the model that one family alone knows; None if none does, or several do."""
    known = [model for model in found if model is not None]
    return known[0] if len(known) == 1 else None


def _layout(shapes: Shapes) -> str:
    if any(name.startswith(("lora_unet_", "lora_te", "lora_transformer_", "lycoris_")) for name in shapes):
        return "kohya"
    return "native" if any(name.startswith(_NATIVE) for name in shapes) else "peft"


def _by_part(flat: Shapes) -> str:
    """Returns the narrowest thing that can be said when several families are possible."""
    starts = {name.partition("_text_model")[0] for name in flat}
    if any("joint_blocks_" in name or re.match(JOINT, name) for name in flat):
        return "sd3"
    if {"lora_te2", "text_encoder_2"} & starts:
        return "sdxl-sd3"
    return "sd1" if "lora_te" in starts else "unknown"


STATE_PREFIXES: Final = ("values.", "optimizer.")
"""Prefixes of names in a checkpoint's optimizer file: exact values, and the optimizer's state."""
_QUANTISED: Final = (
    (".quant_state.", "bitsandbytes' 4 bits (NF4 or FP4)"),
    (".absmax", "bitsandbytes' 4 bits (NF4 or FP4)"),
    (".SCB", "bitsandbytes' 8 bits"),
    (".weight_scale_2", "NVFP4"),
    (".comfy_quant", "ComfyUI's quantised format"),
)
"""Parts of tensor names that indicate packed weights, with the packing's name."""
_NETWORK_PREFIXES: Final = ("model.diffusion_model.", "diffusion_model.", "net.", "unet/", "transformer/")
_VAE_PREFIXES: Final = ("first_stage_model.", "vae/", "vae.")


@cache
def every_marks() -> tuple[Marks, ...]:
    """Each family's `MARKS`, from `models.<family>.names`, read when first asked for: these modules import this one.

    A family in the list whose files look like another's has none.
    """
    names = [f"flame_train.models.{family}.names" for family in FAMILY_TITLES]
    return tuple(importlib.import_module(name).MARKS for name in names if importlib.util.find_spec(name) is not None)


@cache
def model_names() -> Mapping[str, str]:
    """Returns each identifiable model, autoencoder and text encoder -> its usual name."""
    return {name: title for marks in every_marks() for name, title in marks.names.items()} | {
        "sd1-sd2-sdxl": "SD1, SD2 or SDXL",
        "sdxl-sd3": "SDXL or SD3",
        "sd3-flux": "SD3 or Flux",
        "flux2-flux3": "FLUX.2 or FLUX.3",
        "qwen-wan": "Qwen-Image or Wan 2.1",
        "clip-l": "CLIP-L",
        "clip-bigg": "OpenCLIP bigG",
        "clip-h": "OpenCLIP ViT-H",
        "t5-xxl": "T5-XXL",
        "umt5-xxl": "UMT5-XXL",
        "qwen3-0.6b": "Qwen3-0.6B",
        "qwen3-4b": "Qwen3-4B",
        "qwen3-8b": "Qwen3-8B",
        "qwen3-vl-4b": "Qwen3-VL-4B",
        "qwen3-vl-8b": "Qwen3-VL-8B",
        "qwen2.5-vl-7b": "Qwen2.5-VL-7B",
        "mistral-small": "Mistral Small",
    }


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a file. `family` is a key of `model_names()` or "unknown"; `parts` are the components it holds.

    kind: one of these words.
    - checkpoint: several components. unet, transformer, vae, text_encoder: one.
    - lora: a LoRA, or another kind of adapter that is read here. adapter: OFT, and others that are not.
    - state: what a run is continued from.
    - quantised, unknown.

    layout: single-file, diffusers, openclip, transformers, kohya, peft, native or "". `detail` says it in words.
    """

    kind: str
    family: str
    layout: str
    detail: str
    parts: tuple[str, ...] = ()


def identify(shapes: Shapes, metadata: Mapping[str, str] | None = None) -> Identity:
    """Identifies a file by its tensors. `shapes`: name -> shape, as `open_weights(path).shapes`."""
    return _identified(tuple(shapes.items()), tuple((metadata or {}).items()))


@lru_cache(maxsize=8)  # a plan asks for the same files again and again
def _identified(tensors: tuple[tuple[str, Shape], ...], notes: tuple[tuple[str, str], ...]) -> Identity:
    shapes, metadata = dict(tensors), dict(notes)
    if shapes and all(name.startswith(STATE_PREFIXES) for name in shapes):
        words = "a checkpoint of a flame-train run: exact values and optimizer state; the LoRA lies in the same folder"
        return Identity("state", "unknown", "", words)
    if is_adapter(shapes):
        return _adapter(shapes, metadata)
    packed = next(((name, how) for sign, how in _QUANTISED for name in shapes if sign in name), None)
    if packed:
        words = f"a model whose weights are packed in {packed[1]} ({packed[0]}), in a way that is not read here; "
        return Identity("quantised", "unknown", "", words + "use its bf16, fp16, fp8, int8, NF4 or GGUF file")
    network = _stripped(shapes, _NETWORK_PREFIXES)
    network_marks = _network(network)
    parts = _parts(shapes, network_marks)
    if network_marks is not None:
        mark = network_marks[0]
        whole = mark.kind if parts == (mark.kind,) else "checkpoint"
        return _identity(whole, mark.model, mark.layout, mark.note, parts)
    vae = _vae(_stripped(shapes, _VAE_PREFIXES))
    if vae is not None:
        return _identity("vae", *vae, "", parts)
    text = _text_encoder(shapes)
    if text is not None:
        return _identity("text_encoder", *text, "", parts)
    return Identity("unknown", "unknown", "", f"not a model that is known here ({len(shapes)} tensors)")


def could_be(family: str, wanted: str) -> bool:
    """Says whether the identified family agrees with `wanted`: the same, or a name for several that includes it."""
    groups = {"unknown": tuple(model_names())}
    for marks in every_marks():
        groups |= {name: (*groups.get(name, ()), *members) for name, members in marks.groups.items()}
    return family == wanted or wanted in groups.get(family, ()) or family in groups.get(wanted, ())


def lora_could_be(family: str, wanted: str) -> bool:
    """Whether a LoRA of the identified family may be for `wanted`: as `could_be`, or its names are also that one's."""
    return could_be(family, wanted) or any(family in marks.also_reads.get(wanted, ()) for marks in every_marks())


def _identity(kind: str, family: str, layout: str, note: str, parts: tuple[str, ...]) -> Identity:
    words = f"{model_names().get(family, 'unknown')}{note}, {kind.replace('_', ' ')}, {layout} layout"
    if kind == "checkpoint":
        words += f" ({', '.join(part.replace('_', ' ') for part in parts)})"
    return Identity(kind, family, layout, words, parts)


def _adapter(shapes: Shapes, metadata: Mapping[str, str]) -> Identity:
    other = other_kind(shapes)
    family, layout = lora_family_of(shapes, metadata, every_marks())
    name = model_names().get(family, "a model that is not known here")
    if reason := without_place(shapes):
        return Identity("adapter", family, layout, reason)
    if other:
        return Identity("adapter", family, layout, f"{other} for {name}; not a kind that is read here{remedy(other)}")
    naming = "diffusers" if layout == "peft" else layout  # as `convert` and output.format call it
    return Identity("lora", family, layout, f"{read_kind(shapes)} for {name}, {naming} names")


def _stripped(shapes: Shapes, prefixes: Iterable[str]) -> Shapes:
    """Returns the tensors below the first prefix that occurs, without it; all of them when none does."""
    for prefix in prefixes:
        stripped = {name[len(prefix) :]: shape for name, shape in shapes.items() if name.startswith(prefix)}
        if stripped:
            return stripped
    return shapes


def _network(shapes: Shapes) -> tuple[Mark, Marks] | None:
    """Returns the mark of the one family that knows these tensors; None if none does, or several do."""
    fitting = [(mark, marks) for marks in every_marks() if (mark := marks.network(shapes)) is not None]
    return fitting[0] if len(fitting) == 1 else None


def _vae(shapes: Shapes) -> tuple[str, str] | None:
    """Returns family and layout. VAEs of one latent width differ in values only."""
    film = shapes.get("decoder.conv_in.weight"), shapes.get("decoder.conv1.weight")  # in diffusers' names, in Wan's
    for first, layout in zip(film, ("diffusers", "single-file"), strict=True):
        if first is not None and len(first) == 5:
            return {16: "qwen-wan", 48: "wan", 64: "qwenimage"}.get(first[1], "unknown"), layout
    first = film[0]
    if first is None or len(first) != 4:
        return None
    family = {4: "sd1-sd2-sdxl", 16: "sd3-flux", 32: "flux2-flux3", 64: "qwenimage"}.get(first[1], "unknown")
    layout = "diffusers" if any(name.startswith("decoder.up_blocks.") for name in shapes) else "single-file"
    return family, layout


_T5: Final[Mapping[Shape, str]] = {(32128, 4096): "t5-xxl", (256384, 4096): "umt5-xxl"}


def _text_encoder(shapes: Shapes) -> tuple[str, str] | None:
    for name, shape in shapes.items():
        if name.endswith("embeddings.token_embedding.weight") and len(shape) == 2:
            return _clip(shape[1]), "transformers"
    for name, shape in shapes.items():
        if name.endswith("token_embedding.weight") and len(shape) == 2:
            return _clip(shape[1]), "openclip"
    for name, shape in shapes.items():
        known = _T5.get(shape)
        if known and name.endswith(("shared.weight", "encoder.embed_tokens.weight")):
            return known, "transformers"
        if known and name.endswith("token_embd.weight"):
            return known, "llama.cpp"
    if any(name.endswith("layers.0.self_attn.q_norm.weight") for name in shapes):
        return _qwen3(shapes), "transformers"
    if any(name.endswith("layers.0.self_attn.q_proj.bias") for name in shapes):
        return _qwen2_5(shapes), "transformers"
    if any(name.endswith("layers.0.self_attn.q_proj.weight") for name in shapes):
        return _mistral(shapes), "transformers"
    return None


def _qwen3(shapes: Shapes) -> str:
    """By its width, and by what Qwen3-VL has for images, or calls its text half."""
    width = next((shape[-1] for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), 0)
    if any("visual." in name or "language_model." in name for name in shapes):
        return {2560: "qwen3-vl-4b", 4096: "qwen3-vl-8b"}.get(width, "unknown")
    return {1024: "qwen3-0.6b", 2560: "qwen3-4b", 4096: "qwen3-8b"}.get(width, "unknown")


def _qwen2_5(shapes: Shapes) -> str:
    """By its width, and its half for images."""
    width = next((shape[-1] for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), 0)
    seen = any("visual." in name or "language_model." in name for name in shapes)
    return "qwen2.5-vl-7b" if seen and width == 3584 else "unknown"


def _mistral(shapes: Shapes) -> str:
    """By the size of its embedding, which no other decoder that is read here has."""
    embedding = next((shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), ())
    return "mistral-small" if embedding == (131072, 5120) else "unknown"


def _clip(width: int) -> str:
    return {768: "clip-l", 1280: "clip-bigg", 1024: "clip-h"}.get(width, "unknown")


def _parts(shapes: Shapes, found_network: tuple[Mark, Marks] | None) -> tuple[str, ...]:
    """Returns the components in the file, by the prefixes that full checkpoints and diffusers folders use."""
    kinds = [] if found_network is None else [found_network[0].kind]
    if _vae(_stripped(shapes, _VAE_PREFIXES)) is not None:
        kinds.append("vae")
    signs = {
        "text_encoder": (
            *("text_encoder/", "conditioner.embedders.0.", "cond_stage_model."),
            *("text_encoders.clip_l.", "text_encoders.qwen", "text_encoders.mistral"),
            "text_encoders.umt5xxl.",
        ),
        "text_encoder_2": ("text_encoder_2/", "conditioner.embedders.1.", "text_encoders.clip_g."),
        "text_encoder_3": ("text_encoder_3/", "text_encoders.t5xxl."),
    }
    kinds += [part for part, starts in signs.items() if any(name.startswith(starts) for name in shapes)]
    if not kinds and _text_encoder(shapes) is not None:
        kinds.append("text_encoder")
    if found_network is not None:
        t5 = found_network[1].t5
        kinds = list(dict.fromkeys(t5 if part == "text_encoder_3" else part for part in kinds))
    return tuple(kinds)
