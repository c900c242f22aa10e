"""Loads a text encoder from its file, its folder, a whole diffusers folder, or a checkpoint that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flame_train.engine import nn
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Shape
from flame_train.io.resolve import Component, Resolved, resolve
from flame_train.io.weight_files import Weights
from flame_train.io.weights import open_weights
from flame_train.networks.files.build_parts import parts
from flame_train.networks.files.identify import identify
from flame_train.networks.files.part import Part, part_of
from flame_train.networks.files.stated import Stated


@dataclass(frozen=True, slots=True)
class TextNetwork:
    """A kind of text encoder, or a part of one, whose tensors are known by their names, whatever stands before them.

    Attributes:
        name: what a person calls it, such as "T5".
        example: the name of a published file.
        prefix_of: what stands before its names in a file, maybe ""; None if the file holds no such encoder.
        component: its component below some prefixes.
        build: the network, from native names and shapes, and what its folder states.
        noun: what it is.
    """

    name: str
    example: str
    prefix_of: Callable[[Iterable[str]], str | None]
    component: Callable[[str, tuple[str, ...]], Component]
    build: Callable[[Mapping[str, Shape], Stated], nn.Module]
    noun: str = "text encoder"

    def part(self, path: str | Path, component: str = "") -> Part:
        """Returns the encoder in a file or folder, with its weights declared: only headers are read.

        Its `load` takes weights of any float type, fp8 (plain or scaled) included. Tensors go to the device one by
        one, so the host needs memory for the largest alone. A plain fp8 file keeps its exact values with
        `storage=nn.Storage("fp8")`.

        Raises:
            ModelFileError: there is no such encoder, or tensors are missing, unexpected or mis-shaped.
        """
        named = f"{self.name} {self.noun}"
        with open_weights(path) as weights:
            resolved_encoder, resolved = self._resolved(weights, named)
            built = parts(weights, weights.shapes, resolved, [resolved_encoder], self._build)[named]
            stated = Stated.beside(weights.path, resolved_encoder.prefixes)
            return part_of(weights, component or named, built, partial(self._build, named, built[1].shapes, stated))

    def _resolved(self, weights: Weights, named: str) -> tuple[Component, Resolved]:
        prefix, identity = self.prefix_of(weights.names), identify(weights.shapes, weights.metadata)
        if prefix is None or identity.kind == "quantised":
            raise ModelFileError(
                f"{weights.path}: expected a {named}, alone or in a checkpoint, found {identity.detail}; "
                f"name a file such as {self.example}, or a diffusers folder"
            )
        component = self.component(named, (prefix,))
        return component, resolve([component], weights.names)

    def _build(self, _: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        return self.build(native, stated)
