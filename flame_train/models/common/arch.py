"""What decides a diffusion transformer's shapes."""

from __future__ import annotations

from dataclasses import dataclass


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
