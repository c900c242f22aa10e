"""LoRA files: written as kohya or as diffusers have them, read in any dialect, converted without loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.dialects import (
    ALPHA,
    DOWN,
    NOT_PLAIN_LORA,
    UP,
    Place,
    diffusers_name,
    kohya_name,
    spellings,
    split_key,
)
from flame_train.adapters.factors import Array, LoraFactors, LoraState
from flame_train.adapters.folding import alpha_record, fold, recorded_alphas, unfold
from flame_train.errors import ModelFileError
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import SafetensorsFile

_Slots = dict[str, Array]
_Places = dict[tuple[str, str], _Slots]  # (component, module) -> its tensors


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA as read: the factors in their stored dtype, the file's metadata, and how it was spelled."""

    state: dict[str, dict[str, LoraFactors]]
    metadata: dict[str, str]
    dialects: tuple[str, ...]


def to_kohya(state: LoraState, family: LoraFamily) -> dict[str, Array]:
    """Tensors by kohya's names: `lora_down`, `lora_up` and a scalar `alpha` for each module.

    KeyError for a module that the family does not have.
    """
    tensors: dict[str, Array] = {}
    for component in family.components:
        for module, factors in state.get(component.name, {}).items():
            _ = component.modules[module]
            name = kohya_name(component, module)
            tensors[f"{name}.lora_down.weight"] = factors.down
            tensors[f"{name}.lora_up.weight"] = factors.up
            tensors[f"{name}.alpha"] = _alpha_tensor(factors)
    return tensors


def to_diffusers(state: LoraState, family: LoraFamily) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors by diffusers' names, alpha / rank folded into `lora_B`; and the metadata that undoes it.

    No alpha tensors, because several loaders refuse them. See `folding` for what stays exact.
    """
    tensors: dict[str, Array] = {}
    for component in family.components:
        for module, factors in state.get(component.name, {}).items():
            name = diffusers_name(component, module)
            tensors[f"{name}.lora_A.weight"] = factors.down
            tensors[f"{name}.lora_B.weight"] = fold(factors)
    return tensors, alpha_record(state)


def from_file(path: str | Path, family: LoraFamily) -> LoraFile:
    """Read a LoRA of `family` in whichever dialect it is written.

    Arrays are views of the file. Raises ModelFileError listing what could not be placed, with the nearest
    names that could, and every module that is incomplete or whose matrices do not fit together.
    """
    with SafetensorsFile(path) as file:
        table = spellings(family)
        places, dialects = _collect(file, table)
        metadata = dict(file.metadata)
    incomplete = _problems(places)
    if incomplete:
        raise ModelFileError(
            f"{path}: {len(incomplete)} modules of the LoRA do not fit together: {'; '.join(incomplete[:5])}"
        )
    factors_of = _with_alphas(metadata, places, family)
    state: dict[str, dict[str, LoraFactors]] = {}
    for (component, module), slots in sorted(places.items()):
        state.setdefault(component, {})[module] = factors_of(component, module, slots)
    return LoraFile(state, metadata, dialects)


def _alpha_tensor(factors: LoraFactors) -> Array:
    """A scalar in the weights' dtype, as other writers have it, or in fp32 where that would change it."""
    with np.errstate(over="ignore"):
        own = np.array(factors.alpha, factors.down.dtype)
    return own if float(own) == factors.alpha else np.array(factors.alpha, np.float32)


def _collect(file: SafetensorsFile, table: Mapping[str, Place]) -> tuple[_Places, tuple[str, ...]]:
    places: _Places = {}
    dialects: set[str] = set()
    lost: list[str] = []
    for key in file.names:
        found = split_key(key)
        place = table.get(found[0]) if found else None
        if found is None or place is None:
            lost.append(key)
            continue
        slots = places.setdefault((place.component, place.module), {})
        if found[1] in slots:
            raise ModelFileError(f"{file.path}: {key!r} is there twice, under two spellings of one module")
        slots[found[1]] = file.read(key)
        dialects.add(place.dialect)
    if lost:
        raise ModelFileError(_lost_message(file.path, lost, table))
    if not places:
        raise ModelFileError(f"{file.path}: holds no tensors; expected a LoRA")
    return places, tuple(sorted(dialects))


def _lost_message(path: Path, lost: Sequence[str], table: Mapping[str, Place]) -> str:
    for sign, kind in NOT_PLAIN_LORA:
        if any(sign in key for key in lost):
            return f"{path}: is {kind}, not a plain LoRA; only plain LoRA files can be read here"
    lines = [f"{path}: {len(lost)} of its tensors belong to no module of this family, so it is not used:"]
    for key in lost[:5]:
        found = split_key(key)
        near = get_close_matches(found[0], table, n=1) if found else []
        lines.append(f"  {key}" + (f" (nearest known: {near[0]})" if near else ""))
    return "\n".join(lines)


def _problems(places: _Places) -> list[str]:
    found = []
    for (component, module), slots in sorted(places.items()):
        where = f"{component} {module}"
        if DOWN not in slots or UP not in slots:
            found.append(f"{where} has no {UP if DOWN in slots else DOWN} matrix")
            continue
        down, up = slots[DOWN].shape, slots[UP].shape
        if len(down) not in (2, 4) or len(down) != len(up) or any(size != 1 for size in up[2:]):
            found.append(f"{where} has shapes {down} and {up}")
        elif down[0] != up[1] or down[0] == 0:
            found.append(f"{where} has rank {down[0]} in its down matrix and {up[1]} in its up matrix")
        elif ALPHA in slots and not (slots[ALPHA].size == 1 and np.isfinite(float(slots[ALPHA].reshape(())))):
            found.append(f"{where} has an alpha that is not one finite number")
    return found


def _with_alphas(
    metadata: Mapping[str, str], places: _Places, family: LoraFamily
) -> Callable[[str, str, _Slots], LoraFactors]:
    """How to make a module's factors from its tensors, by the best source of alpha that the file offers.

    In order: an alpha tensor, the alphas folded by `to_diffusers`, PEFT's configuration; else alpha = rank.
    """
    modules: dict[str, list[str]] = {}
    for component, module in places:
        modules.setdefault(component, []).append(module)
    folded = recorded_alphas(metadata, modules)
    scale_of = _peft_scales(metadata)
    paths = {component.name: component.modules for component in family.components}

    def make(component: str, module: str, slots: _Slots) -> LoraFactors:
        down, up = slots[DOWN], slots[UP]
        rank = down.shape[0]
        if ALPHA in slots:
            return LoraFactors(down, up, float(slots[ALPHA].reshape(())))
        if (component, module) in folded:
            return unfold(down, up, folded[component, module])
        return LoraFactors(down, up, rank * scale_of(component, paths[component][module], rank))

    return make


def _peft_scales(metadata: Mapping[str, str]) -> Callable[[str, str, int], float]:
    """(component, path in diffusers, rank) -> scale, from `lora_adapter_metadata`; 1 where it is silent."""
    try:
        config: Any = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        config = dict(config)
    except (ValueError, TypeError, RecursionError):
        config = {}

    def scale(component: str, path: str, rank: int) -> float:
        alpha: Any = config.get(f"{component}.lora_alpha")
        patterns: Any = config.get(f"{component}.alpha_pattern")
        for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
            if f".{path}".endswith(f".{pattern.removeprefix('^')}"):
                alpha = value
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            return 1.0
        return float(alpha) / (math.sqrt(rank) if config.get(f"{component}.use_rslora") else rank)

    return scale
