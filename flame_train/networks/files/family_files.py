"""Loads a family's networks one at a time: from checkpoints, diffusers folders, or files of single networks.

The differences between families are values of this class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flame_train.engine import nn
from flame_train.engine.dtype import DType
from flame_train.errors import ModelFileError, counted
from flame_train.io.resolve import Component, Resolved, resolve
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.networks.files.build_parts import Build, parts
from flame_train.networks.files.identify import Identity, could_be, identify, model_names
from flame_train.networks.files.part import Part, part_of
from flame_train.networks.files.stated import Stated

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FamilyFiles:
    """Where a family's networks lie, and how they are built.

    `family` is a key of `model_names()`. `alone` maps the identified family of a single text encoder's file to its
    component. `sort` sorts the names of a file into components, as `io.resolve` does.
    """

    family: str
    components: Sequence[Component]
    alone: Mapping[str, str]
    build: Build
    sort: Callable[[Sequence[Component], Iterable[str], str | None], Resolved] = resolve

    def resolve(self, names: Iterable[str], only: str | None = None) -> Resolved:
        """Returns which tensor of a file, or of a diffusers folder, is which native tensor of which component.

        `only` says that the file holds that component alone.
        """
        return self.sort(self.components, names, only)

    def parts(self, path: str | Path, components: Collection[str]) -> dict[str, Part]:
        """Returns these networks of a file or folder, by component, from one reading of its headers.

        Raises:
            ModelFileError: the file is of another family, which the message names, or lacks a component. Missing,
                unexpected and mis-shaped tensors come in one message, before anything is read.
        """
        with open_weights(path) as weights:
            return self._opened(weights, self._resolved(weights, components), components)

    def all_parts(self, path: str | Path, required: str, skip: Collection[str] = ()) -> dict[str, Part]:
        """Returns every network of the family that a file or folder holds, but for those to `skip`.

        Raises as `parts` does.

        `required` must be there.
        """
        with open_weights(path) as weights:
            resolved = self._resolved(weights, [required])
            present = [name for name, sources in resolved.sources.items() if sources and name not in skip]
            return self._opened(weights, resolved, present)

    def load(
        self,
        path: str | Path,
        component: str,
        *,
        device: str,
        dtype: DType | str,
        check_finite: bool = True,
        storage: nn.Storage | None = None,
    ) -> Any:
        """Returns one network with its weights, of the class that `build` makes.

        Args:
            component: the name of the network, such as "vae".
            check_finite: whether NaN and infinity are refused.
            storage: how quantizable layers are stored; None: as all else.

        Raises:
            ModelFileError: as `parts` and `Part.load`.
        """
        part = self.parts(path, [component])[component]
        return part.load(device=device, dtype=dtype, check_finite=check_finite, storage=storage)

    def _resolved(self, weights: Weights, components: Collection[str]) -> Resolved:
        """Returns the file's tensors sorted into components, after a check of its family and components."""
        identity = identify(weights.shapes, weights.metadata)
        only = self._only(identity, components)
        if not only:
            expected = self._in_words(components)
            raise ModelFileError(f"{weights.path}: expected {expected}, found {identity.detail}; name another file")
        resolved = _resolve(self, weights.names, None if only == "checkpoint" else only)
        prefixes = tuple(prefix for component in self.components for prefix in component.prefixes)
        if only == "checkpoint":
            _tell_stray(weights.path, tuple(name for name in resolved.unknown if not name.startswith(prefixes)))
        lacking = [name for name in components if not resolved.sources.get(name)]
        if lacking:
            raise ModelFileError(
                f"{weights.path}: expected {', '.join(components)}, but it holds no {', no '.join(lacking)}; "
                f"use a full checkpoint or a diffusers folder, or name the file that has it. This is: {identity.detail}"
            )
        return resolved

    def _in_words(self, components: Collection[str]) -> str:
        """Returns the purpose of a file in messages: the family, and the component if it may have its own file."""
        encoders = {component: model_names()[known] for known, component in self.alone.items()}
        family, parts = model_names()[self.family], [encoders.get(c, c.replace("_", " ")) for c in components]
        whole = not components or self.components[0].name in components
        return family if whole else f"{' and '.join(parts)} of {family}"

    def _only(self, found: Identity, components: Collection[str]) -> str:
        """Returns the file's content: "checkpoint" or its one component; an encoder of unknown width counts."""
        if found.kind == "text_encoder":
            (names,) = components if len(components) == 1 else ("",)
            names = names if names.startswith("text_encoder") and found.family == "unknown" else ""
            return self.alone.get(found.family, names)
        known = found.kind in ("checkpoint", *(c.name for c in self.components))
        return found.kind if known and found.family != "unknown" and could_be(found.family, self.family) else ""

    def _opened(self, weights: Weights, resolved: Resolved, components: Collection[str]) -> dict[str, Part]:
        opened = [next(c for c in self.components if c.name == name) for name in components]
        stated = {c.name: Stated.beside(weights.path, c.prefixes) for c in opened}
        if not any(name.startswith(opened[0].prefixes) for name in weights.names):
            opened[0] = replace(opened[0], prefixes=("",))  # alone in its file: what has no place there is unexpected
        made_parts = parts(weights, weights.shapes, resolved, opened, self.build)
        return {
            name: part_of(weights, name, built, partial(self.build, name, built[1].shapes, stated[name]))
            for name, built in made_parts.items()
        }


@lru_cache(maxsize=16)
def _tell_stray(path: Path, names: tuple[str, ...]) -> None:
    """Says once that a checkpoint holds tensors of no part of the model: they may mark another kind of it."""
    if names:
        _LOG.warning(
            "%s: left out %s of no part of the model, such as %s", path, counted(len(names), "tensor"), names[0]
        )


@lru_cache(maxsize=16)
def _resolve(files: FamilyFiles, names: tuple[str, ...], only: str | None) -> Resolved:
    """Returns the components' names of a file's tensors, cached because every stage needs them."""
    return files.resolve(names, only)
