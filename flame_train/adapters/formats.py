"""LoRA files: written as kohya or as diffusers have them, read in any dialect."""

from __future__ import annotations

import logging
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from flame_train.adapters.dialects import (
    BLOCK,
    MatchedKey,
    diffusers_name,
    has_its_names,
    kohya_name,
    spellings,
    split_key,
    written_scale,
)
from flame_train.adapters.factors import Array, Factors, LoraState
from flame_train.adapters.file_form import FileForm
from flame_train.adapters.folding import alpha_record, recorded_alphas
from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.metadata import CONFIG_FILE, METADATA_KEY, config_beside, peft_scales
from flame_train.errors import ModelFileError
from flame_train.io.dtypes import FLOAT_TAGS
from flame_train.io.lora_names import LoraFamily, can_be_left_out, other_kind, parts_of, remedy, without_place
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights

FORMATS: Final = ("kohya", "diffusers")
"""The names in LoRA files; with both, the first is in the file of the LoRA's name."""

_LOG = logging.getLogger(__name__)
_LONGEST: Final = 200  # characters of a name that is shown, or compared with others
_NEAR: Final = 40
_NO_NUMBERS: Final = ("BOOL", "C64")
_BESIDE = "bundle_emb."  # trained words, which OneTrainer keeps in the same file
_Slots = dict[str, Array]
_Key = tuple[str, str, str]  # component, module, path in diffusers if it stands for a part of the module
_Places = dict[_Key, _Slots]


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA as read: the factors in their stored dtype, the file's metadata, and how it was spelled."""

    state: dict[str, dict[str, Factors]]
    metadata: dict[str, str]
    dialects: tuple[str, ...]


def to_kohya(state: LoraState, family: LoraFamily) -> dict[str, Array]:
    """Tensors by kohya's names. KeyError for a module that the family does not have."""
    tensors: dict[str, Array] = {}
    for component in family.components:
        for module, factors in state.get(component.name, {}).items():
            _ = component.modules[module]
            name = kohya_name(component, module)
            tensors |= {name + end: array for end, array in ADAPTERS[factors.kind].files.kohya(factors).items()}
    return tensors


def to_diffusers(state: LoraState, family: LoraFamily) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors by diffusers' names, and the metadata that undoes the folding of alpha / rank.

    KeyError for a module that the family does not have, ModelFileError for an adapter that diffusers does not read.
    """
    tensors: dict[str, Array] = {}
    written: dict[str, dict[str, Any]] = {}
    for component in family.components:
        for module, whole in state.get(component.name, {}).items():
            try:
                parts = ADAPTERS[whole.kind].files.diffusers(whole, component.modules[module])
            except ValueError as fault:
                raise ModelFileError(f"{component.name} {module} is {fault}; only kohya's format holds it") from fault
            for path, (arrays, factors) in parts.items():
                name = diffusers_name(component, path)
                tensors |= {name + end: array for end, array in arrays.items()}
                written.setdefault(component.name, {})[path] = factors
    plain = all(part.scale == 1.0 for parts in written.values() for part in parts.values())
    return tensors, {} if plain else alpha_record(written)


def from_file(path: str | Path, family: LoraFamily, skip_unknown: bool = False) -> LoraFile:
    """Read a LoRA of `family` in whichever dialect it is written. With `skip_unknown` parts of no module are left out.

    Arrays are views of the file. Raises ModelFileError. It lists the unknown names with the nearest known ones, and
    every module that is incomplete or whose matrices do not fit together.
    """
    with open_weights(path) as file:
        (path,) = file.files
        table = spellings(family)
        places, dialects = _collect(file, table, family, skip_unknown)
        metadata = dict(file.metadata)
        by_metadata = has_its_names(file.names) and METADATA_KEY not in metadata
    incomplete = _problems(places)
    if incomplete:
        raise ModelFileError(
            f"{path}: {len(incomplete)} modules of the LoRA do not fit together: {'; '.join(incomplete[:5])}"
        )
    factors = _factors(path, metadata, places, family, by_metadata)
    return LoraFile(_joined(path, factors, family), metadata, dialects)


def _collect(
    file: Weights, table: Mapping[str, MatchedKey], family: LoraFamily, skip_unknown: bool
) -> tuple[_Places, tuple[str, ...]]:
    places: _Places = {}
    dialects: set[str] = set()
    lost: list[str] = []
    absent: dict[str, None] = {}
    beside = [key for key in file.names if key.startswith(_BESIDE)]
    if beside:
        _LOG.warning(
            "%s: %d tensors of embeddings in the LoRA's file, such as %s, are left out",
            file.path,
            len(beside),
            beside[0],
        )
    for key in file.names:
        if key.startswith(_BESIDE):
            continue
        found = split_key(key)
        place = table.get(found[0]) if found else None
        if found and place is None and family.is_absent(found[0]):
            absent[found[0]] = None
            continue
        if found is None or place is None:
            lost.append(key)
            continue
        slots = places.setdefault((place.component, place.module, place.path), {})
        if found[1] in slots:
            raise ModelFileError(f"{file.path}: {key!r} is there twice, under two spellings of one module")
        slots[found[1]] = _real(file, key)
        dialects.add(place.dialect)
    parts = parts_of(lost, len(family.components) > 1)
    if lost and not (skip_unknown and places and all(map(can_be_left_out, parts))):
        raise ModelFileError(_lost_message(file.path, lost, table, parts, bool(places)))
    for part, keys in parts.items():
        what = part or "of no module of this family"
        _LOG.warning("%s: %d tensors are left out: %s, such as %s", file.path, len(keys), what, _cut(keys[0]))
    if not places:
        held = "only layers that the model does not have" if absent else "no tensors"
        raise ModelFileError(f"{file.path}: holds {held}; expected a LoRA")
    if absent:
        _tell_absent(file.path, absent)
    return places, tuple(sorted(dialects))


def _tell_absent(path: Path, modules: Iterable[str]) -> None:
    """Warns of modules that are left out, counted by the block that they are named for."""
    counts = Counter(match[0] if (match := BLOCK.match(module)) else module for module in modules)
    listed = ", ".join(f"{block} ({count})" for block, count in counts.items())
    _LOG.warning(
        "%s: %d modules are of layers that the model does not have, and are left out: %s",
        path,
        sum(counts.values()),
        listed,
    )


def _real(file: Weights, key: str) -> Array:
    """Returns the tensor `key`. Raises ModelFileError where its values are no real numbers."""
    tag = file.info(key).dtype
    if tag not in FLOAT_TAGS and (tag in _NO_NUMBERS or not key.endswith(".alpha")):
        raise ModelFileError(f"{file.path}: {_cut(key)} has dtype {tag}; a LoRA's matrices are floats")
    return file.read(key)


def _lost_message(
    path: Path, lost: Sequence[str], table: Mapping[str, MatchedKey], parts: Mapping[str, Sequence[str]], more: bool
) -> str:
    """Says what is said of tensors that belong to no module."""
    if reason := without_place(lost):
        return f"{path}: is {reason}"
    if kind := other_kind(lost):
        return f"{path}: is {kind}, a kind that is not read here; a LoRA, LoCon, LoHa, LoKr or DoRA is{remedy(kind)}"
    lines = [f"{path}: {len(lost)} of its tensors belong to no module of this family, so it is not used:"]
    lines += [f"  {len(keys)} are {part}, such as {_cut(keys[0])}" for part, keys in parts.items() if part]
    if more and all(map(can_be_left_out, parts)):
        lines[0] = f"{lines[0][:-1]} (convert, merge and sample leave them out with --skip-unknown):"
    for key in parts.get("", [])[:5]:
        found = split_key(key)
        near = _nearest(found[0], table) if found else []
        lines.append(f"  {_cut(key)}" + (f" (nearest known: {near[0]})" if near else ""))
    return "\n".join(lines)


def _nearest(name: str, table: Mapping[str, MatchedKey]) -> list[str]:
    """Returns the known name most like this one, of those that begin or end alike: comparing all is slow."""
    if len(name) > _LONGEST:
        return []
    begin, end = sorted(table), sorted(known[::-1] for known in table)
    i, j = bisect(begin, name), bisect(end, name[::-1])
    near = [*begin[max(0, i - _NEAR) : i + _NEAR], *(known[::-1] for known in end[max(0, j - _NEAR) : j + _NEAR])]
    return get_close_matches(name, dict.fromkeys(near), n=1)


def _cut(key: str) -> str:
    return key if len(key) <= _LONGEST else f"{key[:_LONGEST]}... ({len(key)} characters)"


def _form(slots: _Slots) -> FileForm:
    """Returns the form of the kind that all of a module's arrays belong to; the default kind's if they fit none."""
    forms = [kind.files for kind in ADAPTERS.values()]
    return next((form for form in forms if slots.keys() <= form.written.keys()), forms[0])


def _problems(places: _Places) -> list[str]:
    faults = {key: _form(slots).problem(slots) for key, slots in sorted(places.items())}
    return [f"{component} {path or module} {fault}" for (component, module, path), fault in faults.items() if fault]


def _factors(
    path: Path, metadata: Mapping[str, str], places: _Places, family: LoraFamily, by_metadata: bool
) -> dict[_Key, Factors]:
    """Returns each place's factors; alpha is a tensor, PEFT's configuration or metadata, else the rank."""
    try:
        scale_of = peft_scales(metadata, path)
    except ValueError as fault:
        raise ModelFileError(f"{path}: {fault}") from None
    names = {component.name: component.modules for component in family.components}
    paths = {key: key[2] or next(iter(names[key[0]][key[1]])) for key in places}
    written: dict[str, list[str]] = {}
    for (component, _, _), name in paths.items():
        written.setdefault(component, []).append(name)
    folded = recorded_alphas(metadata, written)
    factors: dict[_Key, Factors] = {}
    assumed = 0
    for key, slots in places.items():
        component, name = key[0], paths[key]
        rank = min((array.shape[0] for array in slots.values() if array.ndim > 1), default=1)
        try:
            scale = written_scale(metadata, rank) if by_metadata else scale_of(component, name, rank)
            scale = written_scale(metadata, rank, "lora_alpha") if scale is None and not folded else scale
        except ValueError as fault:
            raise ModelFileError(f"{path}: {fault}") from None
        known = folded.get((component, name))
        assumed += scale is None and known is None and "alpha" not in slots
        factors[key] = _form(slots).read(slots, known, 1.0 if scale is None else scale)
    if assumed and metadata.get("ss_network_alpha", "") != metadata.get("ss_network_dim"):
        _tell_assumed(path, metadata, assumed)
    return factors


def _tell_assumed(path: Path, metadata: Mapping[str, str], modules: int) -> None:
    """Warns that alpha is taken to be the rank, with what else speaks of one."""
    spoken = [f"its metadata has {key} {metadata[key]}" for key in ("ss_network_alpha",) if key in metadata]
    if alpha := config_beside(path).get("lora_alpha"):
        spoken.append(f"{CONFIG_FILE} beside it has lora_alpha {alpha}, and is of adapter_model.safetensors")
    _LOG.warning(
        "%s: says no alpha for %d modules, so it is taken to be their rank%s",
        path,
        modules,
        f" ({'; '.join(spoken)})" * bool(spoken),
    )


def _joined(path: str | Path, factors: Mapping[_Key, Factors], family: LoraFamily) -> dict[str, dict[str, Factors]]:
    """Returns whole modules from those parts that the file has. Raises ModelFileError for parts that do not fit."""
    names = {component.name: component.modules for component in family.components}
    parts: dict[tuple[str, str], dict[str, Factors]] = {}
    for (component, module, part), found in sorted(factors.items(), key=lambda item: item[0]):
        parts.setdefault((component, module), {})[part] = found
    state: dict[str, dict[str, Factors]] = {}
    for (component, module), pieces in parts.items():
        if "" in pieces and len(pieces) > 1:
            raise ModelFileError(f"{path}: {component} {module!r} is there twice, whole and in parts")
        paths, what = names[component][module], f"{component} {module}"
        kinds = sorted({piece.kind for piece in pieces.values()})
        try:
            if len(kinds) > 1:
                raise ValueError(f"they are of kinds {' and '.join(kinds)}")
            whole = ADAPTERS[kinds[0]].files.join(pieces, paths)
        except ValueError as fault:
            what = f"{what}:" if "" in pieces else f"the parts of {what} do not fit together:"
            raise ModelFileError(f"{path}: {what} {fault}") from fault
        state.setdefault(component, {})[module] = whole
    return state
