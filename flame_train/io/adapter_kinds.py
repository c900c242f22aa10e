"""LoRA's relatives by how their tensors' names end: those that are read here, and those that must not be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final


def _by_ends(kinds: Mapping[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """A pattern of whole names, and the kind that they tell, for each pattern of how a name ends."""
    return tuple((re.compile(rf".*({ends})"), kind) for ends, kind in kinds.items())


_TUCKER: Final = "Tucker-decomposed"
_WITHOUT_TUCKER: Final = (
    "it has a third factor for the kernels of convolutions. Train it without use_tucker (use_cp in older LyCORIS), or "
    "merge it into a checkpoint in a program that reads it, and make a LoRA of the difference with flame-train extract"
)

_KINDS: Final = _by_ends(
    {
        r"\.hada_t[12]": f"{_TUCKER} LoHa",
        r"\.lokr_t2": f"{_TUCKER} LoKr",
        r"\.(oft_blocks|oft_diag|oft_R(\.\w+)*)": "OFT",
        r"\.lora_mid\.weight": f"{_TUCKER} LoCon",
        r"(lora|lycoris)_.*\.[ab][12]\.weight": "GLoRA",
        r"\.on_input": "IA3",
        r"\.diff(_b)?": "full differences of weights",
        r"\.lora_(B|up)\.bias": "LoRA with biases, such as BFL's control LoRAs",
        r"\.processor\.(qkv|proj)_lora[12]?\.(down|up)\.weight": "XLabs LoRA",
    }
)

_READ: Final = _by_ends(
    {
        r"\.hada_w[12]_[ab]": "LoHa",
        r"\.lokr_w[12](_[ab])?": "LoKr",
        r"\.lora_magnitude_vector(\.\w+)*": "DoRA, norms of output rows as PEFT has them,",
        r"\.magnitude": "DoRA, norms of output rows as ai-toolkit has them,",
    }
)
_DORA: Final = (".dora_scale", "DoRA, norms of {} as LyCORIS has them,")

_PLACES: Final = (
    (
        re.compile(r"(img|txt)_(attn|mlp|mod)(\.\w+)*\.lora_(down|up)\.weight"),
        "EriDiffusion's LoRA for Flux: it holds one pair of matrices for all blocks, and names no block, so there is "
        "no place for it; train it again",
    ),
    (
        re.compile(r"(lora\.)?blocks\.\d+\.(\w+\.)+(lora_)?[AB]"),
        "a LoRA that names layers by their number over all blocks, such as EriDiffusion's blocks.06.attn.q.lora_A: "
        "these names do not say which attention of a block is meant (attn1 or attn2 in SDXL, image or text in SD3 and "
        "Flux), so it is not read; save it with the model's own names",
    ),
)


def without_place(names: Iterable[str]) -> str | None:
    """What a LoRA is whose names do not tell where its matrices belong, and why; None for all others."""
    every = tuple(names)
    return next((why for pattern, why in _PLACES if any(pattern.fullmatch(name) for name in every)), None)


def read_kind(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What an adapter of these tensors is, if it is of a kind that is read here: "LoRA" as a rule."""
    for pattern, kind in _READ:
        if any(pattern.fullmatch(name) for name in shapes):
            return kind
    scales = [shape for name, shape in shapes.items() if name.endswith(_DORA[0])]
    if scales:
        return _DORA[1].format("input columns" if all(shape[:1] == (1,) for shape in scales) else "output rows")
    return "LoRA"


def other_kind(names: Iterable[str]) -> str | None:
    """The kind of the adapter with these tensors, if flame-train does not read that kind."""
    every = tuple(names)
    return next((kind for pattern, kind in _KINDS if any(pattern.fullmatch(name) for name in every)), None)


def remedy(kind: str) -> str:
    """What to do about a kind that `other_kind` names, to be added to a message; empty where nothing is known."""
    return f": {_WITHOUT_TUCKER}" if kind.startswith(_TUCKER) else ""
