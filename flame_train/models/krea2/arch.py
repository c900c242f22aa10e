"""What decides the shapes of Krea 2's denoiser, and how it is read from a file and what its folder states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from flame_train.networks.arch import block_count, shape_of
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.rope import published_axes, stated_axes

PATCH: Final = 2  # the side of a token in latent pixels
_EPS: Final = 1e-5
_THETA: Final = 1000.0
_shape: Final = partial(shape_of, "Krea 2", "a Krea 2 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Krea2Arch:
    """Everything that decides the network's shapes, and the base of its rotary frequencies."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves as many heads of queries (arXiv 2305.13245)."""
    hidden: int
    """The width of the gated networks."""
    channels: int = 16
    """Of the latents."""
    frequencies: int = 256
    """The width of the sinusoid of times."""
    text_dim: int = 2560
    """Of each of the text encoder's states."""
    text_layers: int = 12
    """Layers of the text encoder of which there are states."""
    text_heads: int = 20
    text_kv_heads: int = 20
    text_hidden: int = 6912
    layerwise: int = 2
    """Blocks over the states of a token."""
    refiners: int = 2
    """Blocks over the tokens of a text."""
    axes: tuple[int, int, int] = (32, 48, 48)
    """How many values of a head encode the image (always 0 here), a token's row and its column."""
    theta: float = _THETA
    eps: float = _EPS

    @classmethod
    def base(cls) -> Self:
        """Returns Krea 2 Raw, and Turbo, which was distilled from it."""
        return cls(width=6144, depth=28, heads=48, kv_heads=12, hidden=16384)

    @classmethod
    def tiny(cls, text_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(
            width=64,
            depth=2,
            heads=4,
            kv_heads=2,
            hidden=96,
            frequencies=32,
            text_dim=text_dim,
            text_layers=3,
            text_heads=2,
            text_kv_heads=2,
            text_hidden=64,
            layerwise=1,
            refiners=1,
            axes=published_axes(16),
        )

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says."""
        width, features = _shape(shapes, "first.weight")
        (head_dim,) = _shape(shapes, "blocks.0.attn.qknorm.qnorm.scale")
        (text_head_dim,) = _shape(shapes, "txtfusion.refiner_blocks.0.attn.qknorm.qnorm.scale")
        arch = cls(
            width=width,
            depth=block_count(shapes, "blocks"),
            heads=_shape(shapes, "blocks.0.attn.wq.weight")[0] // head_dim,
            kv_heads=_shape(shapes, "blocks.0.attn.wk.weight")[0] // head_dim,
            hidden=_shape(shapes, "blocks.0.mlp.gate.weight")[0],
            channels=features // PATCH**2,
            frequencies=_shape(shapes, "tmlp.0.weight")[1],
            text_dim=_shape(shapes, "txtmlp.1.weight")[1],
            text_layers=_shape(shapes, "txtfusion.projector.weight")[1],
            text_heads=_shape(shapes, "txtfusion.refiner_blocks.0.attn.wq.weight")[0] // text_head_dim,
            text_kv_heads=_shape(shapes, "txtfusion.refiner_blocks.0.attn.wk.weight")[0] // text_head_dim,
            text_hidden=_shape(shapes, "txtfusion.refiner_blocks.0.mlp.gate.weight")[0],
            layerwise=block_count(shapes, r"txtfusion\.layerwise_blocks"),
            refiners=block_count(shapes, r"txtfusion\.refiner_blocks"),
            axes=stated_axes(stated.values.get("axes_dims_rope"), head_dim),
            theta=stated.number("rope_theta", _THETA),
            eps=stated.number("norm_eps", _EPS),
        )
        stated.require(
            attention_head_dim=head_dim,
            num_attention_heads=arch.heads,
            num_key_value_heads=arch.kv_heads,
            text_num_attention_heads=arch.text_heads,
            text_num_key_value_heads=arch.text_kv_heads,
            num_text_layers=arch.text_layers,
            axes_dims_rope=arch.axes,
        )
        return arch
