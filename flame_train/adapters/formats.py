"""LoRA files: written as kohya or as diffusers have them, read in any dialect."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import numpy as np

from flame_train.adapters.dialects import (
    ALPHA,
    DOWN,
    UP,
    Place,
    diffusers_name,
    kohya_name,
    spellings,
    split_key,
)
from flame_train.adapters.factors import Array, LoraFactors, LoraState
from flame_train.adapters.folding import alpha_record, fold, recorded_alphas, unfold
from flame_train.adapters.fused import entire, join, split
from flame_train.adapters.peft_config import peft_scales
from flame_train.errors import ModelFileError
from flame_train.io.adapter_kinds import other_kind
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import SafetensorsFile

FORMATS: Final = ("kohya", "diffusers")
"""What LoRA files are written as; where both are asked for, the first is the one called lora.safetensors."""

_LOG = logging.getLogger(__name__)
_BESIDE = "bundle_emb."  # trained words, which OneTrainer keeps in the same file
_Slots = dict[str, Array]
_Key = tuple[str, str, str]  # component, module, path in diffusers if it stands for a part of the module
_Places = dict[_Key, _Slots]


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

    No alpha tensors, because several loaders refuse them. See `folding` for what stays exact, `fused` for modules that
    diffusers cuts up. KeyError for a module that the family does not have.
    """
    tensors: dict[str, Array] = {}
    written: dict[str, dict[str, LoraFactors]] = {}
    for component in family.components:
        for module, whole in state.get(component.name, {}).items():
            for path, factors in split(whole, component.modules[module]).items():
                name = diffusers_name(component, path)
                tensors[f"{name}.lora_A.weight"] = factors.down
                tensors[f"{name}.lora_B.weight"] = fold(factors)
                written.setdefault(component.name, {})[path] = factors
    return tensors, alpha_record(written)


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
    return LoraFile(_joined(path, _factors(path, metadata, places, family), family), metadata, dialects)


def _alpha_tensor(factors: LoraFactors) -> Array:
    """A scalar in the weights' dtype, as other writers have it, or in fp32 where that would change it."""
    with np.errstate(over="ignore"):
        own = np.array(factors.alpha, factors.down.dtype)
    return own if float(own) == factors.alpha else np.array(factors.alpha, np.float32)


def _collect(file: SafetensorsFile, table: Mapping[str, Place]) -> tuple[_Places, tuple[str, ...]]:
    places: _Places = {}
    dialects: set[str] = set()
    lost: list[str] = []
    beside = [key for key in file.names if key.startswith(_BESIDE)]
    if beside:
        _LOG.warning(
            "%s: %d tensors of embeddings that lie beside the LoRA, such as %s, are left out", file.path, len(beside),
            beside[0],
        )  # fmt: skip
    for key in file.names:
        if key.startswith(_BESIDE):
            continue
        found = split_key(key)
        place = table.get(found[0]) if found else None
        if found is None or place is None:
            lost.append(key)
            continue
        slots = places.setdefault((place.component, place.module, place.path), {})
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
    if kind := other_kind(lost):
        return f"{path}: is {kind}, not a plain LoRA; only plain LoRA files can be read here"
    lines = [f"{path}: {len(lost)} of its tensors belong to no module of this family, so it is not used:"]
    for key in lost[:5]:
        found = split_key(key)
        near = get_close_matches(found[0], table, n=1) if found else []
        lines.append(f"  {key}" + (f" (nearest known: {near[0]})" if near else ""))
    return "\n".join(lines)


def _problems(places: _Places) -> list[str]:
    found = []
    for (component, module, path), slots in sorted(places.items()):
        where = f"{component} {path or module}"
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


def _factors(
    path: str | Path, metadata: Mapping[str, str], places: _Places, family: LoraFamily
) -> dict[_Key, LoraFactors]:  # fmt: skip
    """Each place's factors, with alpha from the best source that the file offers.

    In order: an alpha tensor, the alphas folded by `to_diffusers`, PEFT's configuration; else alpha = rank. Raises
    ModelFileError for a configuration that is not understood.
    """
    try:
        scale_of = peft_scales(metadata)
    except ValueError as fault:
        raise ModelFileError(f"{path}: {fault}") from None
    names = {component.name: component.modules for component in family.components}
    paths = {key: key[2] or next(iter(names[key[0]][key[1]])) for key in places}
    written: dict[str, list[str]] = {}
    for (component, _, _), name in paths.items():
        written.setdefault(component, []).append(name)
    folded = recorded_alphas(metadata, written)
    found: dict[_Key, LoraFactors] = {}
    for key, slots in places.items():
        (component, _, _), name = key, paths[key]
        down, up = slots[DOWN], slots[UP]
        if ALPHA in slots:
            found[key] = LoraFactors(down, up, float(slots[ALPHA].reshape(())))
        elif (component, name) in folded:
            found[key] = unfold(down, up, folded[component, name])
        else:
            rank = down.shape[0]
            found[key] = LoraFactors(down, up, rank * scale_of(component, name, rank))
    return found


def _joined(
    path: str | Path, factors: Mapping[_Key, LoraFactors], family: LoraFamily
) -> dict[str, dict[str, LoraFactors]]:  # fmt: skip
    """Whole modules, from those parts of them that the file has. Raises ModelFileError for parts that do not fit."""
    names = {component.name: component.modules for component in family.components}
    parts: dict[tuple[str, str], dict[str, LoraFactors]] = {}
    for (component, module, part), found in sorted(factors.items(), key=lambda item: item[0]):
        parts.setdefault((component, module), {})[part] = found
    state: dict[str, dict[str, LoraFactors]] = {}
    for (component, module), pieces in parts.items():
        if "" in pieces and len(pieces) > 1:
            raise ModelFileError(f"{path}: {component} {module!r} is there twice, whole and in parts")
        paths, what = names[component][module], f"{component} {module}"
        try:
            whole = entire(pieces[""], paths) if "" in pieces else join(pieces, paths)
        except ValueError as fault:
            what = f"{what}:" if "" in pieces else f"the parts of {what} do not fit together:"
            raise ModelFileError(f"{path}: {what} {fault}") from fault
        state.setdefault(component, {})[module] = whole
    return state
