"""From what a file was identified as to the family whose LoRA names apply to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flame_train.errors import ModelFileError
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import MAX_METADATA_VALUE
from flame_train.io.weights import open_weights, shapes_of
from flame_train.models.identify import FAMILY_NAMES, Identity, could_be, identify
from flame_train.models.keys import flux, sdxl

_SUPPORTED: Final = {"sdxl": sdxl.lora_family, "flux": flux.lora_family}


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
    for family, make in _SUPPORTED.items():
        if could_be(identity.family, family):
            return make()
    known = ", ".join(FAMILY_NAMES[family] for family in _SUPPORTED)
    raise ModelFileError(f"{path}: {identity.detail}; LoRAs can be converted and merged for {known} only")


def split_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The metadata that may be written, and the keys of what is too long to be."""
    short = {key: value for key, value in metadata.items() if len(value.encode()) <= MAX_METADATA_VALUE}
    return short, tuple(sorted(metadata.keys() - short.keys()))
