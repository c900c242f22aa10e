"""The sizes of a network, and how they are read from the names and shapes of a file's tensors.

`from_shapes` of every architecture takes native names and shapes, and what the folder states beside them. It raises
ModelFileError that names a missing tensor, or what is stated otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flame_train.errors import ModelFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerArch:
    """The sizes that every diffusion transformer has."""

    width: int
    depth: int
    """Blocks, but for those of a kind that a network counts apart."""
    head_dim: int = 128
    channels: int = 16
    """Of the latents."""


Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of each tensor."""


def shape_of(network: str, kind: str, shapes: Shapes, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor. ModelFileError, for the `network` that is not of this `kind`, if it is missing."""
    if name not in shapes:
        raise ModelFileError(f"{network}: expected a tensor {name}, which is missing: this is not {kind}")
    return shapes[name]


def shape_of_encoder(kind: str, shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    """Returns the shape of a text encoder's tensor. ModelFileError if it is missing or has other dims."""
    if len(shapes.get(name, ())) != dims:
        shape = shapes.get(name, "none")
        raise ModelFileError(
            f"text encoder: expected a tensor {name} of {dims} dimensions, found {shape}: this is not {kind}"
        )
    return shapes[name]


def block_count(shapes: Shapes, blocks: str) -> int:
    """Returns how many blocks the list of blocks `blocks` has, by the numbers in the names."""
    return len({m[1] for name in shapes if (m := re.match(rf"{blocks}\.(\d+)\.", name))})
