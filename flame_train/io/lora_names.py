"""How a family's LoRA files name the parts of its model: plain data of its key tables; and which relatives are read.

A module is known by its native path (`input_blocks.4.1.transformer_blocks.0.attn1.to_q`); each dialect has
its own spelling of it. Flattened spellings cannot be taken apart by looking at underscores, so every
dialect is resolved through a table made from these lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from flame_train.io.keymap import KeyMap, Source


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


Modules = Mapping[str, Mapping[str, Source]]
"""Native module path -> the paths it has in diffusers, each with how its rows are taken from the native weight's.

One path as a rule; several where diffusers cuts the weight up, such as into queries, keys and values.
"""


@dataclass(frozen=True, slots=True)
class LoraComponent:
    """One network of a model, and what its modules are called."""

    name: str  # "unet"; also the prefix in diffusers files
    kohya: str  # "lora_unet"
    modules: Modules
    others: tuple[str, ...] = ()  # further dotted prefixes seen in files, before either path
    flat: tuple[str, ...] = ()  # further flattened prefixes, before the path in diffusers
    absent: re.Pattern[str] | None = None  # modules of some files that this network does not have
    alpha_lost: re.Pattern[str] | None = None  # modules whose alpha diffusers loses in kohya's naming
    kohya_paths: Literal["native", "diffusers"] = "native"  # whose paths kohya's names are made of


@dataclass(frozen=True, slots=True, eq=False)
class LoraFamily:
    """A model family as LoRA files speak of it; all but the components goes into a file's metadata.

    Equal only to itself, so that it can be the key of values computed from its long lists.
    """

    name: str
    components: tuple[LoraComponent, ...]
    base_version: str
    architecture: str
    implementation: str
    resolution: str = "1024x1024"
    network_module: str = "networks.lora"
    several_predictions: bool = False  # the noise or v: a file then says which

    def is_absent(self, module: str) -> bool:
        """Tells whether `module`, as spelled in a file, is known to be of no layer of this family."""
        return any(c.absent is not None and c.absent.fullmatch(module) is not None for c in self.components)


def modules_by_table(native: Iterable[str], to_diffusers: KeyMap) -> Modules:
    """Returns the modules of a network whose weights the table knows. ValueError for one that it does not."""
    pulled = to_diffusers.pull(f"{module}.weight" for module in native)
    if pulled.unknown:
        raise ValueError(f"not modules of this network: {pulled.unknown[:5]}")
    modules: dict[str, dict[str, Source]] = {}
    for there, source in pulled.sources.items():
        (here,) = source.names
        modules.setdefault(here.removesuffix(".weight"), {})[there.removesuffix(".weight")] = source
    return modules


def modules_as_they_are(native: Iterable[str]) -> Modules:
    """Returns the modules of a network that diffusers names as we do."""
    return {module: {module: Source((module,))} for module in native}
