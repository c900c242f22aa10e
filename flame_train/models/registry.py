"""Every model family by name: each is a folder here, and a line in `flame_train/families.py`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flame_train.errors import ModelFileError
from flame_train.families import FAMILY_TITLES
from flame_train.io.weights import open_weights
from flame_train.models.common.family import NOTHING_NAMED, Family, Networks, Opening
from flame_train.networks.files.identify import could_be, identify


def _family(name: str) -> Family:
    module = importlib.import_module(f"flame_train.models.{name}.family")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Family)]
    (families,) = (kind for kind in kinds if kind.__module__ == module.__name__)
    return families()


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType({name: _family(name) for name in FAMILY_TITLES})
"""Every family by name. `init`, `bench`, `quickstart` and the other tools know a family from here."""


def family_of(path: Path) -> Family:
    """Returns the family of a base model, by its headers. Raises ModelFileError for one that is not supported."""
    with open_weights(path) as weights:
        identity = identify(weights.shapes, weights.metadata)
    for name, family in FAMILIES.items():
        if identity.kind != "lora" and identity.family != "unknown" and could_be(identity.family, name):
            return family
    known = ", ".join(family.title for family in FAMILIES.values())
    raise ModelFileError(f"{path}: expected a base model of {known}, but this is: {identity.detail}")


__all__ = ["FAMILIES", "NOTHING_NAMED", "Family", "Networks", "Opening", "family_of"]
