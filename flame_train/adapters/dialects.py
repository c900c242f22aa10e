"""How LoRA files spell their keys: every ending in use, and every name a module goes by.

Dialects: kohya (`lora_unet_input_blocks_4_1_proj_in.lora_down.weight`), the same with diffusers' paths,
PEFT as diffusers writes it (`unet.down_blocks.1...to_q.lora_A.weight`), and its two older spellings. The last
is native paths with dots (`diffusion_model.input_blocks.4.1...`), or bare, without a prefix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from flame_train.adapters.kinds import ADAPTERS
from flame_train.io.keymap import Op
from flame_train.io.lora_names import LoraComponent, LoraFamily

RANK_KEY: Final = "rank"
ALPHA_KEY: Final = "alpha"

BLOCK: Final = re.compile(r"\w+\.\d+")
"""The block that a bare native name begins with: `input_blocks.1`."""

_ITS_NAMES: Final = re.compile(r"(input_blocks|middle_block|output_blocks)\.")


def has_its_names(names: Iterable[str]) -> bool:
    """Says whether all names are those of SDXL's native UNet without a prefix."""
    return all(_ITS_NAMES.match(name) for name in names)


def written_scale(metadata: Mapping[str, str], rank: int, key: str = ALPHA_KEY) -> float | None:
    """Returns alpha / rank for a module of `rank`, by the metadata's `key`; None where it has none.

    Raises:
        ValueError: the alpha is no positive number, or the metadata's rank is not `rank`.
    """
    if key not in metadata:
        return None
    alpha = _number(metadata[key])
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"its metadata has {key} {metadata[key]!r}; expected a positive number")
    if RANK_KEY in metadata and _number(metadata[RANK_KEY]) != rank:
        raise ValueError(
            f"its metadata has rank {metadata[RANK_KEY]!r}, but its matrices have rank {rank}, so alpha / rank is not "
            "known; correct the metadata"
        )
    return alpha / rank


def _number(text: str) -> float:
    """Returns NaN for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


NATIVE: Final = "native"
_DENOISERS: Final = ("unet", "transformer")
_OLD_TEXT_PARTS: Final = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


@dataclass(frozen=True, slots=True)
class MatchedKey:
    """The module that a spelling stands for, and the dialect it belongs to.

    `path` is the module's path in diffusers where its rows there are others than the module's own, else empty.
    """

    component: str
    module: str
    dialect: str
    path: str = ""


def split_key(key: str) -> tuple[str, str] | None:
    """Returns (the module as spelled, the array's name in its kind's file form), or None for a key of no LoRA."""
    for suffix, array in (item for kind in ADAPTERS.values() for item in kind.files.suffixes.items()):
        if key.endswith(suffix):
            return _modern(key.removesuffix(suffix)), array
    return None


def _modern(module: str) -> str:
    """Renames old files' `attn1.processor.to_out` to `attn1.to_out.0`, `self_attn.to_q` to `self_attn.q_proj`."""
    path, _, last = module.rpartition(".")
    if path.endswith(".self_attn") and last in _OLD_TEXT_PARTS:
        return f"{path}.{_OLD_TEXT_PARTS[last]}"
    if path.endswith(".processor"):
        return f"{path.removesuffix('.processor')}.{'to_out.0' if last == 'to_out' else last}"
    return module


@lru_cache(maxsize=4)
def spellings(family: LoraFamily) -> Mapping[str, MatchedKey]:
    """Returns every spelling of every module of the family. ValueError if one spelling could mean two modules."""
    by_spelling: dict[str, MatchedKey] = {}
    for component in family.components:
        for module in component.modules:
            for spelling, place in _spellings_of(component, module):
                known = by_spelling.setdefault(spelling, place)
                if (known.component, known.module, known.path) != (place.component, place.module, place.path):
                    raise ValueError(f"{spelling!r} could mean {known} or {place}")
    return by_spelling


def kohya_name(component: LoraComponent, module: str) -> str:
    """Returns `lora_unet` and the path, every dot an underscore: the native one, or that in diffusers."""
    path = module if component.kohya_paths == "native" else next(iter(component.modules[module]))
    return f"{component.kohya}_{path.replace('.', '_')}"


def diffusers_name(component: LoraComponent, path: str) -> str:
    """Returns `unet.` and the path in diffusers."""
    return f"{component.name}.{path}"


def _spellings_of(component: LoraComponent, module: str) -> list[tuple[str, MatchedKey]]:
    own = [(module, "")]
    own += [(path, "" if source.op is Op.COPY else path) for path, source in component.modules[module].items()]
    spellings = [(kohya_name(component, module), MatchedKey(component.name, module, "kohya"))]
    # newer software drops the leading text_model. of the text encoders
    written = dict.fromkeys(
        pair for path, part in own for pair in ((path, part), (path.removeprefix("text_model."), part))
    )
    dotted = dict.fromkeys((f"{component.name}.", f"base_model.model.{component.name}."), "peft")
    dotted |= dict.fromkeys(component.others, NATIVE)
    if component.name in _DENOISERS:
        dotted["base_model.model."] = "peft"
    for prefix, dialect in dotted.items():
        spellings += [(prefix + path, MatchedKey(component.name, module, dialect, part)) for path, part in written]
    for prefix in (component.kohya, *component.flat):
        for path, part in own if component.kohya_paths == "diffusers" else own[1:]:
            place = MatchedKey(component.name, module, "kohya with diffusers paths", part)
            spellings.append((f"{prefix}_{path.replace('.', '_')}", place))
    return spellings
