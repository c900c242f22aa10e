"""Which family an adapter file belongs to, from its names, a few shapes, and its metadata as a last resort."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from flame_train.io.adapter_kinds import other_kind, without_place
from flame_train.networks.files.signs import JOINT, Shapes, Signs

_LORA_ENDS: Final = re.compile(
    r".*(\.lora_(down|up)\.weight|\.lora_[AB](\.[^.]+)?\.weight|[._](lora|lora_linear_layer)\.(down|up)\.weight"
    r"|\.hada_w[12]_[ab]|\.lokr_w[12](_[ab])?)"
)
_SAME_NAMES: Final = {
    ("flux", "chroma"),
    ("flux", "qwenimage1"),
    ("flux", "flux3"),
}  # of what the names say, and what the metadata then makes of it
# the layouts of published single files, below their prefix or without one
_NATIVE: Final = (
    *("diffusion_model.", "model.diffusion_model.", "double_blocks.", "single_blocks.", "joint_blocks."),
    *("input_blocks.", "middle_block.", "output_blocks."),
)


def is_adapter(shapes: Shapes) -> bool:
    """True for a LoRA or one of its relatives."""
    refused = other_kind(shapes) or without_place(shapes)
    return refused is not None or any(_LORA_ENDS.fullmatch(name) for name in shapes)


def lora_family_of(shapes: Shapes, metadata: Mapping[str, str], every: Sequence[Signs]) -> tuple[str, str]:
    """Family (a key of `identify.FAMILY_NAMES`, or "unknown") and layout ("kohya", "peft" or "native").

    Dots of names become underscores, so that one sign serves all naming schemes.
    """
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    named, written = _by_names(flat, every), _by_metadata(metadata, every)
    family = written if (named, written) in _SAME_NAMES else named or written or _by_part(flat)
    return family or "unknown", _layout(shapes)


def _layout(shapes: Shapes) -> str:
    if any(name.startswith(("lora_unet_", "lora_te", "lora_transformer_", "lycoris_")) for name in shapes):
        return "kohya"
    return "native" if any(name.startswith(_NATIVE) for name in shapes) else "peft"


def _by_names(flat: Shapes, every: Sequence[Signs]) -> str | None:
    """The model that names and shapes prove; None if several are possible."""
    return next((family for signs in reversed(every) if (family := signs.lora(flat)) is not None), None)


def _by_metadata(metadata: Mapping[str, str], every: Sequence[Signs]) -> str | None:
    """The model that is written down; as with names, of two that fit the one further down the list of families."""
    written = f"{metadata.get('ss_base_model_version', '')} {metadata.get('modelspec.architecture', '')}".lower()
    return next((family for signs in reversed(every) for sign, family in signs.written if sign in written), None)


def _by_part(flat: Shapes) -> str:
    """The narrowest thing that can be said when several families are possible."""
    starts = {name.partition("_text_model")[0] for name in flat}
    if any("joint_blocks_" in name or JOINT.match(name) for name in flat):
        return "sd3"
    if {"lora_te2", "text_encoder_2"} & starts:
        return "sdxl-sd3"
    return "sd1" if "lora_te" in starts else "unknown"
