"""LoRA's relatives by how their tensors' names end: files that must not be taken for plain LoRAs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_KINDS: Final = tuple(
    (re.compile(rf".*({ends})"), kind)
    for ends, kind in (
        (r"\.hada_(w[12]_[ab]|t[12])", "LoHa"),
        (r"\.lokr_(w[12]|t2|w[12]_[ab])", "LoKr"),
        (r"\.(oft_blocks|oft_diag|oft_R(\.\w+)*)", "OFT"),
        (r"\.(dora_scale|magnitude|lora_magnitude_vector(\.\w+)*)", "DoRA"),
        (r"\.lora_mid\.weight", "Tucker-decomposed LoCon"),
        (r"(lora|lycoris)_.*\.[ab][12]\.weight", "GLoRA"),
        (r"\.on_input", "IA3"),
        (r"\.diff(_b)?", "full differences of weights"),
        (r"\.lora_(B|up)\.bias", "LoRA with biases, such as BFL's control LoRAs"),
        (r"\.processor\.(qkv|proj)_lora[12]?\.(down|up)\.weight", "XLabs LoRA"),
    )
)


def other_kind(names: Iterable[str]) -> str | None:
    """The kind of an adapter with these tensors, if it is not a plain LoRA."""
    every = tuple(names)
    return next((kind for pattern, kind in _KINDS if any(pattern.fullmatch(name) for name in every)), None)
