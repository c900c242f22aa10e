"""The scales that diffusers records with a LoRA: PEFT's configuration of each component, as JSON in the metadata.

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

_LARGEST: Final = 3.4e38  # what fp32 can hold
_LONGEST: Final = 300
_MOST_REPETITIONS: Final = 3
_MOST_PATTERNS: Final = 100  # among plain paths, of which PEFT writes one for each module
_PLAIN: Final = re.compile(r"(?=.{1,300}\Z)\w+(\.\w+)*")
_REPETITION: Final = re.compile(r"(?<!\\)[*+{?]")
_REPEATED_GROUP: Final = re.compile(r"(?<!\\)\)[*+{?]")


def peft_scales(metadata: Mapping[str, str]) -> Callable[[str, str, int], float]:
    """(component, path in diffusers, rank) -> scale; 1 where the metadata is silent or makes no sense.

    ValueError for a pattern that is no regular expression, or one that could take forever to match: files come from
    strangers.
    """
    config = _config(metadata)
    patterns = {
        component: _Patterns(found)
        for name, found in config.items()
        if isinstance(found, dict) and (component := name.removesuffix(".alpha_pattern")) != name
    }

    def scale(component: str, path: str, rank: int) -> float:
        usual = config.get(f"{component}.lora_alpha")
        alpha = patterns[component].first(path, usual) if component in patterns else usual
        if not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST:
            return 1.0
        return float(alpha) / (math.sqrt(rank) if config.get(f"{component}.use_rslora") else rank)

    return scale


class _Patterns:
    """The patterns of one component in their order. Plain paths are looked up: there may be one for each module."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._values = list(found.values())
        self._plain = {text: i for i, text in enumerate(found) if _PLAIN.fullmatch(text)}
        others = [(i, text) for i, text in enumerate(found) if text not in self._plain]
        if len(others) > _MOST_PATTERNS:
            raise ValueError(f"{METADATA_KEY} has {len(others)} patterns; at most {_MOST_PATTERNS} are tried")
        self._others = [(i, _pattern(text)) for i, text in others]

    def first(self, path: str, usual: Any) -> Any:
        """The value of the first pattern that fits `path` or what follows one of its dots, else `usual`."""
        parts = path.split(".")
        ends = (".".join(parts[i:]) for i in range(len(parts)))
        fitting = [self._plain[end] for end in ends if end in self._plain]
        fitting += [i for i, pattern in self._others if pattern.match(path)]
        return self._values[min(fitting)] if fitting else usual


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
