"""The scales that diffusers records beside a LoRA: PEFT's configuration of each component, as JSON in the metadata.

A key of `alpha_pattern` is a regular expression. PEFT matches it against a module's whole path or what follows one of
its dots, and takes the first that fits; so does this.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

METADATA_KEY: Final = "lora_adapter_metadata"

_LONGEST: Final = 300
_MOST_REPETITIONS: Final = 3
_REPETITION: Final = re.compile(r"(?<!\\)[*+{?]")
_REPEATED_GROUP: Final = re.compile(r"(?<!\\)\)[*+{?]")


def peft_scales(metadata: Mapping[str, str]) -> Callable[[str, str, int], float]:
    """(component, path in diffusers, rank) -> scale; 1 where the metadata is silent or makes no sense.

    ValueError for a pattern that is no regular expression, or one that could take forever to match: files come from
    strangers.
    """
    config = _config(metadata)
    patterns = {
        component: [(_pattern(text), alpha) for text, alpha in found.items()]
        for name, found in config.items()
        if isinstance(found, dict) and (component := name.removesuffix(".alpha_pattern")) != name
    }

    def scale(component: str, path: str, rank: int) -> float:
        fitting = (alpha for pattern, alpha in patterns.get(component, ()) if pattern.match(path))
        alpha = next(fitting, config.get(f"{component}.lora_alpha"))
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            return 1.0
        return float(alpha) / (math.sqrt(rank) if config.get(f"{component}.use_rslora") else rank)

    return scale


def _config(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        return dict(json.loads(metadata.get(METADATA_KEY, "{}")))
    except (ValueError, TypeError, RecursionError):
        return {}


def _pattern(text: str) -> re.Pattern[str]:
    endless = len(_REPETITION.findall(text)) > _MOST_REPETITIONS or _REPEATED_GROUP.search(text)
    if len(text) > _LONGEST or endless:
        raise ValueError(
            f"{METADATA_KEY} has an alpha_pattern that is not tried: {text[:60]!r}; expected at most {_LONGEST} "
            f"characters, {_MOST_REPETITIONS} repetitions and no repeated group"
        )
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{METADATA_KEY} has an alpha_pattern {text!r} that is no pattern: {error}") from None
