"""What decides a diffusion transformer's shapes, and how a file's names and shapes tell it."""

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
    """Blocks with a stream for the image and one for the text."""
    head_dim: int = 64
    channels: int = 16
    """Of the latents."""
    context_dim: int = 4096
    """Of the text encoders' output."""
    pooled_dim: int
    """Of the CLIPs' pooled output."""


def shape_of(shapes: Mapping[str, tuple[int, ...]], name: str, title: str) -> tuple[int, ...]:
    """The shape of a tensor that every transformer of the family `title` has. Raises ModelFileError without it."""
    if name not in shapes:
        raise ModelFileError(f"{title}: expected a tensor {name}, which is missing: this is not a {title} transformer")
    return shapes[name]


def blocks_in(shapes: Mapping[str, tuple[int, ...]], blocks: str) -> int:
    """How many blocks there are below the name `blocks`."""
    return len({m[1] for name in shapes if (m := re.match(rf"{re.escape(blocks)}\.(\d+)\.", name))})
