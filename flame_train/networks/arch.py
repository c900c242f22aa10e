"""What decides a diffusion transformer's shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerArch:
    """The sizes that every diffusion transformer has."""

    width: int
    depth: int
    """Blocks, but for those of a kind that a network counts apart."""
    head_dim: int = 128
    channels: int = 16
    """Of the latents."""
