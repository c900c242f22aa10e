"""From a file's identity to the family whose LoRA names apply to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from flame_train.adapters.dialects import MatchedKey, spellings
from flame_train.adapters.factors import LoraState
from flame_train.errors import ModelFileError, NonFiniteError
from flame_train.io.keymap import Shape
from flame_train.io.lora_names import LoraFamily
from flame_train.io.resolve import Resolved
from flame_train.io.safetensors import MAX_METADATA_VALUE
from flame_train.io.weights import open_weights
from flame_train.models.registry import FAMILIES
from flame_train.networks.files.identify import Identity, could_be, identify, lora_could_be


def refuse_non_finite(lora: Path, state: LoraState) -> None:
    """Raises NonFiniteError for a LoRA that would spoil whatever it is added to."""
    for component, modules in state.items():
        for module, factors in modules.items():
            arrays = (*factors.arrays.values(), np.float32(factors.alpha))
            if not all(np.isfinite(array.astype(np.float32)).all() for array in arrays):
                raise NonFiniteError(
                    f"{lora}: its {component} {module} holds NaN or infinity; training it went wrong, or the file is "
                    "damaged: use one of an earlier step, or download it again"
                )


def identify_file(path: Path) -> Identity:
    """The identity of `path`, from headers alone. Raises ModelFileError."""
    with open_weights(path) as weights:
        return identify(weights.shapes, weights.metadata)


def require_lora(path: Path) -> Identity:
    """The identity of a plain LoRA. Raises ModelFileError for any other file, with its identity."""
    identity = identify_file(path)
    if identity.kind != "lora":
        raise ModelFileError(f"{path}: expected a LoRA, but this is: {identity.detail}")
    return identity


def lora_family(path: Path, identity: Identity, base: Identity | None = None) -> LoraFamily:
    """How the LoRA file `path` names modules; where several families would fit, that of the `base` it is for.

    Raises ModelFileError for one that is not supported.
    """
    fitting = [family for family in FAMILIES.values() if lora_could_be(identity.family, family.name)]
    if not fitting:
        raise ModelFileError(f"{path}: {identity.detail}; LoRAs can be converted and merged for {_known()} only")
    own = [family for family in fitting if base is not None and could_be(base.family, family.name)]
    with open_weights(path) as weights:
        return (own or fitting)[0].lora_names_in(weights.shapes)


def components_of(identity: Identity, shapes: Mapping[str, Shape]) -> tuple[Mapping[str, MatchedKey], str]:
    """The modules of a LoRA by how they are spelled, and the component that is adapted as a rule.

    Both empty for a family that is not supported.
    """
    for family in FAMILIES.values():
        if identity.family != "unknown" and could_be(identity.family, family.name):
            names = family.lora_names_in(shapes)
            return spellings(names), names.components[0].name
    return {}, ""


def resolve_base(path: Path, names: Iterable[str], identity: Identity, family: str) -> Resolved:
    """A base model's tensors by component and native name, `family` being that of the LoRA it is for.

    Raises ModelFileError for a base of another family.
    """
    files = FAMILIES[family].files
    if identity.kind == "text_encoder":
        return files.resolve(names, only=files.alone.get(identity.family, "unknown"))
    if identity.family == "unknown" or not could_be(identity.family, family):
        raise ModelFileError(f"{path}: this is {identity.detail}; LoRAs can be merged into {_known()} only")
    return files.resolve(names, only=None if identity.kind == "checkpoint" else identity.kind)


def _known() -> str:
    return ", ".join(family.title for family in FAMILIES.values())


def split_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The metadata that may be written, and the keys of values that are too long."""
    short = {key: value for key, value in metadata.items() if len(value.encode()) <= MAX_METADATA_VALUE}
    return short, tuple(sorted(metadata.keys() - short.keys()))
