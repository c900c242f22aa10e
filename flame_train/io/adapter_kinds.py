"""LoRA's relatives by how their tensors' names end: those that are read here, and those that must not be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final


def _by_suffix(kinds: Mapping[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Returns a pattern of whole names, and the kind that they tell, for each pattern of a suffix."""
    return tuple((re.compile(rf".*({suffix})"), kind) for suffix, kind in kinds.items())


_TUCKER: Final = "Tucker-decomposed"
_WITHOUT_TUCKER: Final = (
    "it has a third factor for the kernels of convolutions. Train it without use_tucker (use_cp in older LyCORIS), or "
    "merge it into a checkpoint in a program that reads it, and make a LoRA of the difference with flame-train extract"
)

_KINDS: Final = _by_suffix(
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

_READ: Final = _by_suffix(
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


_TEXT: Final = "a text encoder's LoRA, which is not trained or read here for this family"
_PARTS: Final = (
    (re.compile(r"lora_te\d?_.+|(\w+\.)?text_encoders?(_\d)?\..+|te\d?\..+|(text_model|encoder)\.layers?\..+"), _TEXT),
    (re.compile(r".*\.[wb]_norm"), "norms and biases that LyCORIS trained beside it (train_norm)"),
    (re.compile(r".*\.(diff|diff_b|set_weight|bias)"), "whole weights or biases beside it"),
    (re.compile(r".*\.scalar"), "factors of its updates (LyCORIS's use_scalar)"),
    (re.compile(r".*\.reshape_weight"), "other shapes for the weights that it changes"),
)
_CHANGES_THE_REST: Final = frozenset(words for _, words in _PARTS[-2:])


def parts_of(names: Iterable[str], reads_text: bool) -> dict[str, list[str]]:
    """Returns tensors of a LoRA that no module has, by what they are; "" for those of which nothing is known.

    `reads_text` says that the family's text encoders get LoRAs, so that one of them is misspelt, and not unread.
    """
    by_part: dict[str, list[str]] = {}
    parts = _PARTS[1:] if reads_text else _PARTS
    for name in names:
        by_part.setdefault(next((words for pattern, words in parts if pattern.fullmatch(name)), ""), []).append(name)
    return by_part


def can_be_left_out(part: str) -> bool:
    """Tells whether what is left of a LoRA without this part is as it was meant."""
    return part not in _CHANGES_THE_REST


def without_place(names: Iterable[str]) -> str | None:
    """Returns what a LoRA is whose names do not tell where its matrices belong, and why; None for all others."""
    every = tuple(names)
    return next((why for pattern, why in _PLACES if any(pattern.fullmatch(name) for name in every)), None)


def read_kind(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns what an adapter of these tensors is, if it is of a kind that is read here: "LoRA" as a rule."""
    for pattern, kind in _READ:
        if any(pattern.fullmatch(name) for name in shapes):
            return kind
    scales = [shape for name, shape in shapes.items() if name.endswith(_DORA[0])]
    if scales:
        return _DORA[1].format("input columns" if all(shape[:1] == (1,) for shape in scales) else "output rows")
    return "LoRA"


def other_kind(names: Iterable[str]) -> str | None:
    """Returns the kind of the adapter with these tensors, if flame-train does not read that kind."""
    every = tuple(names)
    return next((kind for pattern, kind in _KINDS if any(pattern.fullmatch(name) for name in every)), None)


def remedy(kind: str) -> str:
    """Gives what to do about a kind that `other_kind` names, to be added to a message; empty where nothing is known."""
    return f": {_WITHOUT_TUCKER}" if kind.startswith(_TUCKER) else ""
