"""Which family an adapter file belongs to, from its names, a few shapes, and its metadata as a last resort."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from flame_train.io.adapter_kinds import other_kind, without_place
from flame_train.networks.files.marks import JOINT, Marks, Shapes

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
    """True for a LoRA or one of its relatives."""
    refused = other_kind(shapes) or without_place(shapes)
    return refused is not None or any(_LORA_ENDS.fullmatch(name) for name in shapes)


def lora_family_of(shapes: Shapes, metadata: Mapping[str, str], every: Sequence[Marks]) -> tuple[str, str]:
    """Family (a key of `identify.model_names()`, or "unknown") and layout ("kohya", "peft" or "native").

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
    """The model that one family alone knows; None if none does, or several do."""
    known = [model for model in found if model is not None]
    return known[0] if len(known) == 1 else None


def _layout(shapes: Shapes) -> str:
    if any(name.startswith(("lora_unet_", "lora_te", "lora_transformer_", "lycoris_")) for name in shapes):
        return "kohya"
    return "native" if any(name.startswith(_NATIVE) for name in shapes) else "peft"


def _by_part(flat: Shapes) -> str:
    """The narrowest thing that can be said when several families are possible."""
    starts = {name.partition("_text_model")[0] for name in flat}
    if any("joint_blocks_" in name or re.match(JOINT, name) for name in flat):
        return "sd3"
    if {"lora_te2", "text_encoder_2"} & starts:
        return "sdxl-sd3"
    return "sd1" if "lora_te" in starts else "unknown"
