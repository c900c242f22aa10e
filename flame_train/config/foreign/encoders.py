"""Text encoders that another trainer trains beside the denoiser, as keys of `[text_encoders]`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .conversions import number
from .table import NOTHING, Changed, is_off

ENCODERS: Final = MappingProxyType(
    {"sdxl": ("clip_l", "clip_g"), "sd3": ("clip_l", "clip_g", "t5"), "flux": ("clip_l", "t5")}
)
"""A family's text encoders, in the order in which other trainers count them."""

TRAINED: Final = ("text_encoders.train", "text_encoders.lr", "text_encoders.targets")
"""The keys that `trained` fills in."""


def trained(rates: Mapping[str, Any], denoiser: Any, targets: str, remark: str = "") -> Any:
    """The keys for text encoders with these learning rates.

    Args:
        rates: by encoder, its learning rate there; one that is off is not trained.
        denoiser: the learning rate that becomes `optimizer.lr`.
        targets: the preset of `text_encoders.targets` that chooses the layers that the program adapts.
        remark: what is said beside the values.

    Returns:
        A mapping, with a remark where the encoders' rates differ, or NOTHING where none is trained.
    """
    used = {name: float(number(rate)) for name, rate in rates.items() if not is_off(number(rate))}
    if not used:
        return NOTHING
    shared = next(iter(used.values()))
    found: dict[str, Any] = {"text_encoders.train": list(used), "text_encoders.targets": [targets]}
    if is_off(denoiser) or shared != float(number(denoiser)):
        found["text_encoders.lr"] = shared
    others = [f'"{name}.*" {rate:g}' for name, rate in used.items() if rate != shared]
    if others:
        remark = f"one rate for all here; [[lora.rules]] gives a rate of its own: {', '.join(others)}"
    return Changed(found, remark) if remark else found
