"""From what a file was identified as to the family whose LoRA names apply to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from flame_train.adapters.dialects import Place, spellings
from flame_train.adapters.factors import LoraState
from flame_train.errors import ModelFileError, NonFiniteError
from flame_train.io.keymap import Shape
from flame_train.io.lora_names import LoraFamily
from flame_train.io.resolve import Resolved
from flame_train.io.safetensors import MAX_METADATA_VALUE
from flame_train.io.weights import open_weights, shapes_of
from flame_train.models.identify import FAMILY_NAMES, Identity, could_be, identify
from flame_train.models.keys import flux, sd3, sdxl


class _Resolve(Protocol):
    """A base model's tensors by component and native name."""

    def __call__(self, names: Iterable[str], only: str | None = None) -> Resolved: ...


def refuse_non_finite(lora: Path, state: LoraState) -> None:
    """Raises NonFiniteError for a LoRA that would spoil whatever it is added to."""
    for component, modules in state.items():
        for module, factors in modules.items():
            arrays = (factors.down, factors.up, np.float32(factors.alpha))
            if not all(np.isfinite(array.astype(np.float32)).all() for array in arrays):
                raise NonFiniteError(
                    f"{lora}: its {component} {module} holds NaN or infinity; training it went wrong, or the file is "
                    "damaged: use one of an earlier step, or download it again"
                )


@dataclass(frozen=True, slots=True)
class _Supported:
    """A family's name tables.

    `lora_family`: the names of LoRA files, given what is in the file at hand. `bases`: what a base model of the family
    is identified as. `encoders`: which component a text encoder in a file of its own is, by what that is identified as.
    """

    lora_family: Callable[[Mapping[str, Shape]], LoraFamily]
    resolve: _Resolve
    bases: tuple[str, ...]
    encoders: Mapping[str, str]


_SUPPORTED: Final[Mapping[str, _Supported]] = {
    "sdxl": _Supported(
        lambda shapes: sdxl.lora_family(),
        sdxl.resolve,
        ("sdxl",),
        {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2"},
    ),
    "flux": _Supported(
        lambda shapes: flux.lora_family(),
        flux.resolve,
        ("flux-dev", "flux-schnell"),
        {"clip-l": "text_encoder", "t5-xxl": "text_encoder_2"},
    ),
    "sd3": _Supported(
        sd3.lora_family_of,
        sd3.resolve,
        ("sd3-medium", "sd35-medium", "sd35-large", "sd3"),
        {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2", "t5-xxl": "text_encoder_3"},
    ),
}


def identify_file(path: Path) -> Identity:
    """What `path` is, from headers alone. Raises ModelFileError."""
    with open_weights(path) as weights:
        return identify(shapes_of(weights), weights.metadata)


def require_lora(path: Path) -> Identity:
    """The identity of a plain LoRA. Raises ModelFileError for anything else, saying what it is."""
    identity = identify_file(path)
    if identity.kind != "lora":
        raise ModelFileError(f"{path}: expected a LoRA, but this is: {identity.detail}")
    return identity


def lora_family(path: Path, identity: Identity, base: Identity | None = None) -> LoraFamily:
    """How the LoRA file `path` names modules; where several families would fit, that of the `base` it is for.

    Raises ModelFileError for one that is not supported.
    """
    fitting = [found for family, found in _SUPPORTED.items() if could_be(identity.family, family)]
    if not fitting:
        raise ModelFileError(f"{path}: {identity.detail}; LoRAs can be converted and merged for {_known()} only")
    own = [found for found in fitting if base is not None and base.family in found.bases]
    with open_weights(path) as weights:
        return (own or fitting)[0].lora_family(shapes_of(weights))


def components_of(identity: Identity, shapes: Mapping[str, Shape]) -> tuple[Mapping[str, Place], str]:
    """The modules of a LoRA by how they are spelled, and the component that is adapted as a rule.

    Both empty for a family that is not supported.
    """
    for family, found in _SUPPORTED.items():
        if identity.family != "unknown" and could_be(identity.family, family):
            names = found.lora_family(shapes)
            return spellings(names), names.components[0].name
    return {}, ""


def resolve_base(path: Path, names: Iterable[str], identity: Identity, family: str) -> Resolved:
    """A base model's tensors by component and native name, `family` being that of the LoRA it is for.

    Raises ModelFileError for a base of another family.
    """
    found = _SUPPORTED[family]
    if identity.kind == "text_encoder":
        return found.resolve(names, only=found.encoders.get(identity.family, "unknown"))
    if identity.family not in found.bases:
        raise ModelFileError(f"{path}: this is {identity.detail}; LoRAs can be merged into {_known()} only")
    return found.resolve(names, only=None if identity.kind == "checkpoint" else identity.kind)


def _known() -> str:
    return ", ".join(FAMILY_NAMES[family] for family in _SUPPORTED)


def split_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The metadata that may be written, and the keys of what is too long to be."""
    short = {key: value for key, value in metadata.items() if len(value.encode()) <= MAX_METADATA_VALUE}
    return short, tuple(sorted(metadata.keys() - short.keys()))
