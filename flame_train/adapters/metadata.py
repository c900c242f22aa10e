"""The metadata of a LoRA file, by which web interfaces recognise, name and look up LoRAs.

The `ss_*` and `sshs_*` keys are kohya's convention; `modelspec.*` is the ModelSpec 1.0.1 standard. All values
are text. No time and no path is written, so that equal runs give equal bytes.

The scales that PEFT's configuration says stand in the metadata too, as diffusers records them, or in a file beside. A
key of its `alpha_pattern` is a regular expression. PEFT matches it against a module's whole path or what follows one of
its dots, and takes the first that fits; so does this.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flame_train.adapters.factors import Array, LoraState
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import hash_data, serialize

METADATA_KEY: Final = "lora_adapter_metadata"
MERGED_KEY: Final = "flame_train.merged"
"""The metadata of the LoRAs, by name and strength, that `merge` put into a file."""

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
    """Returns (component, path in diffusers, rank) -> scale; None where no configuration says it, or makes no sense.

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


_LEGACY_BEGIN: Final = 0x100000
_LEGACY_END: Final = 0x110000


def network_metadata(state: LoraState, family: LoraFamily) -> dict[str, str]:
    """Returns the `ss_*` keys that every reader of kohya files relies on; "Dynamic" where modules differ.

    As kohya has it, convolutions larger than 1x1 have a rank and an alpha of their own, among the arguments.
    """
    all_factors = [factors for modules in state.values() for factors in modules.values()]
    args = (
        ADAPTERS[all_factors[0].kind].files.args_of(f for f in all_factors if f.kind == all_factors[0].kind)
        if all_factors
        else {}
    )
    kernels = [factors for factors in all_factors if _has_kernel(factors)]
    linear = [factors for factors in all_factors if not _has_kernel(factors)] or all_factors
    if linear is not all_factors and kernels:
        args |= _of_kernels(kernels)
    ranks, alphas = ({str(f.rank) for f in linear}, {str(float(f.alpha)) for f in linear})
    return {
        "ss_v2": str(family.base_version.startswith("sd_v2")),
        "ss_base_model_version": family.base_version,
        "ss_network_module": "lycoris.kohya" if "algo" in args else family.network_module,
        "ss_network_dim": ranks.pop() if len(ranks) == 1 else "Dynamic",
        "ss_network_alpha": alphas.pop() if len(alphas) == 1 else "Dynamic",
        "ss_network_args": json.dumps(args, sort_keys=True),
    }


def _has_kernel(factors: Factors) -> bool:
    return math.prod(factors.weight_shape[2:]) > 1


def _of_kernels(kernels: Sequence[Factors]) -> dict[str, str]:
    """Returns kohya's arguments for convolutions, where all have the same."""
    ranks, alphas = {factors.rank for factors in kernels}, {float(factors.alpha) for factors in kernels}
    if len(ranks) > 1 or len(alphas) > 1:
        return {}
    return {"conv_dim": str(ranks.pop()), "conv_alpha": f"{alphas.pop():g}"}


def model_spec(family: LoraFamily, title: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns ModelSpec 1.0.1's required keys; `extra` (author, trigger_phrase, ...) goes by bare name."""
    fields = {
        "sai_model_spec": "1.0.1",
        "architecture": family.architecture,
        "implementation": family.implementation,
        "title": title,
        "resolution": family.resolution,
    }
    return {f"modelspec.{key}": value for key, value in (fields | dict(extra or {})).items()}


def with_hashes(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns `metadata` with the three hashes of these tensors put in, or put right.

    `sshs_model_hash`: SHA-256 of everything after the header. `sshs_legacy_hash`: first 8 digits of the
    SHA-256 of bytes 0x100000 to 0x110000. Both of a file that has the `ss_*` metadata only.
    """
    trained = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    model_hash = hash_data(tensors)
    hashes = {"sshs_model_hash": model_hash, "sshs_legacy_hash": _legacy_hash(tensors, trained)}
    if any(key.startswith("modelspec.") for key in metadata):
        hashes["modelspec.hash_sha256"] = f"0x{model_hash}"
    return dict(metadata) | hashes


def _legacy_hash(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    position = 0
    for chunk in serialize(tensors, metadata):
        digest.update(chunk[max(0, _LEGACY_BEGIN - position) : max(0, _LEGACY_END - position)])
        position += len(chunk)
        if position >= _LEGACY_END:
            break
    return digest.hexdigest()[:8]
