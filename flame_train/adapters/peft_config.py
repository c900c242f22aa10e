"""The scales that PEFT's configuration says: in the metadata, as diffusers records them, or in a file beside.

A key of `alpha_pattern` is a regular expression. PEFT matches it against a module's whole path or what follows one of
its dots, and takes the first that fits; so does this.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

METADATA_KEY: Final = "lora_adapter_metadata"

CONFIG_FILE: Final = "adapter_config.json"

_OWN_NAME: Final = "adapter_model"
_MOST_BYTES: Final = 1_000_000
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_MORE_THAN_SCALES: Final = (
    *("fan_in_fan_out", "lora_bias", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("target_parameters", "velora_config", "monteclora_config", "kasa_config", "arrow_config"),
)
"""Keys of PEFT with which the update is another than scale * B @ A, or belongs to no layer."""

_LARGEST: Final = 3.4e38  # what fp32 can hold
_LONGEST: Final = 300
_MOST_REPETITIONS: Final = 3
_MOST_PATTERNS: Final = 100  # among plain paths, of which PEFT writes one for each module
_PLAIN: Final = re.compile(r"(?=.{1,300}\Z)\w+(\.\w+)*")
_REPETITION: Final = re.compile(r"(?<!\\)[*+{?]")
_REPEATED_GROUP: Final = re.compile(r"(?<!\\)\)[*+{?]")


def peft_scales(metadata: Mapping[str, str], file: Path | None = None) -> Callable[[str, str, int], float | None]:
    """(component, path in diffusers, rank) -> scale; None where no configuration says it, or makes no sense.

    A configuration stands in the metadata, by component, or in `adapter_config.json` beside a `file` that is called as
    PEFT calls its own. ValueError for one that asks for more than a scale, and for a pattern that is no regular
    expression, or could take forever to match: files come from strangers.
    """
    config, beside = _config(metadata), config_beside(file) if file and file.stem.startswith(_OWN_NAME) else {}
    for where, keys in ((CONFIG_FILE, beside), (METADATA_KEY, {k.rpartition(".")[2]: v for k, v in config.items()})):
        if other := _unread(keys):
            raise ValueError(f"{where} asks for {other}, which is not read here")

    config |= {f".{key}": value for key, value in beside.items()}
    patterns = {
        component: _Patterns(found)
        for name, found in config.items()
        if isinstance(found, dict) and (component := name.removesuffix(".alpha_pattern")) != name
    }

    def said(component: str, key: str) -> Any:
        return config.get(f"{component}.{key}", config.get(f".{key}"))

    def scale(component: str, path: str, rank: int) -> float | None:
        usual, own = said(component, "lora_alpha"), patterns.get(component, patterns.get(""))
        alpha = own.first(path, usual) if own else usual
        if not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST:
            return None
        return float(alpha) / (math.sqrt(rank) if said(component, "use_rslora") else rank)

    return scale


def config_beside(file: Path) -> dict[str, Any]:
    """Says what `adapter_config.json` beside a file says; nothing where there is none.

    ValueError if it cannot be read.
    """
    place = file.with_name(CONFIG_FILE)
    try:
        if place.stat().st_size > _MOST_BYTES:
            raise ValueError(f"over {_MOST_BYTES} bytes")
        return dict(json.loads(place.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE} beside it cannot be read ({error}); mend or remove it") from None


def _unread(config: Mapping[str, Any]) -> str:
    """Returns the first thing that a configuration asks for and no scale does; empty if there is none."""
    kind, begun = config.get("peft_type"), config.get("init_lora_weights")
    if kind is not None and str(kind).upper() != "LORA":
        return f"peft_type {kind}"
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        return f"init_lora_weights {begun}, an adapter of a base that was changed"
    return next((f"{key} = {config[key]!r}" for key in _MORE_THAN_SCALES if config.get(key)), "")


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
        """Returns the value of the first pattern that fits `path` or what follows one of its dots, else `usual`."""
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
