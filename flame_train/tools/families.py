"""From what a file was identified as to the family whose LoRA names apply to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from flame_train.errors import ModelFileError
from flame_train.io.lora_names import LoraFamily
from flame_train.io.resolve import Resolved
from flame_train.io.safetensors import MAX_METADATA_VALUE
from flame_train.io.weights import open_weights, shapes_of
from flame_train.models.identify import FAMILY_NAMES, Identity, could_be, identify
from flame_train.models.keys import flux, sdxl


class _Keys(Protocol):
    """A family's name tables."""

    def lora_family(self) -> LoraFamily: ...

    def resolve(self, names: Iterable[str], only: str | None = None) -> Resolved: ...


@dataclass(frozen=True, slots=True)
class _Supported:
    """`bases`: what a base model of the family is identified as.

    `encoders`: which component a text encoder in a file of its own is, by what that is identified as.
    """

    keys: _Keys
    bases: tuple[str, ...]
    encoders: Mapping[str, str]


_SUPPORTED: Final[Mapping[str, _Supported]] = {
    "sdxl": _Supported(sdxl, ("sdxl",), {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2"}),
    "flux": _Supported(flux, ("flux-dev", "flux-schnell"), {"clip-l": "text_encoder", "t5-xxl": "text_encoder_2"}),
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


def lora_family(path: Path, identity: Identity) -> LoraFamily:
    """How LoRA files of that family name modules. Raises ModelFileError for one that is not supported."""
    for family, found in _SUPPORTED.items():
        if could_be(identity.family, family):
            return found.keys.lora_family()
    raise ModelFileError(f"{path}: {identity.detail}; LoRAs can be converted and merged for {_known()} only")


def resolve_base(path: Path, names: Iterable[str], identity: Identity, family: str) -> Resolved:
    """A base model's tensors by component and native name, `family` being that of the LoRA it is for.

    Raises ModelFileError for a base of another family.
    """
    found = _SUPPORTED[family]
    if identity.kind == "text_encoder":
        return found.keys.resolve(names, only=found.encoders.get(identity.family, "unknown"))
    if identity.family not in found.bases:
        raise ModelFileError(f"{path}: this is {identity.detail}; LoRAs can be merged into {_known()} only")
    return found.keys.resolve(names, only=None if identity.kind == "checkpoint" else identity.kind)


def _known() -> str:
    return ", ".join(FAMILY_NAMES[family] for family in _SUPPORTED)


def split_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The metadata that may be written, and the keys of what is too long to be."""
    short = {key: value for key, value in metadata.items() if len(value.encode()) <= MAX_METADATA_VALUE}
    return short, tuple(sorted(metadata.keys() - short.keys()))
