"""What decides the shapes of Qwen-Image 2.1's denoiser, and how it is read from a file and what its folder states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.rope import stated_axes

FREQUENCIES: Final = 256  # the width of the sinusoid of times
_EPS: Final = 1e-6
_shape: Final = partial(shape_of, "Qwen-Image 2.1", "a Qwen-Image 2.1 transformer")


def image_axes(head_dim: int) -> tuple[int, int, int]:
    """16, 56 and 56 of 128, as published, and the like of other heads."""
    each = head_dim * 7 // 16 // 2 * 2
    return head_dim - 2 * each, each, each


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageArch(TransformerArch):
    """Everything that decides the network's shapes, and the base of its rotary frequencies."""

    hidden: int
    """The width of the gated network."""
    channels: int = 64
    """Of the latents, each pixel of which is a token."""
    text_dim: int = 4096
    """Of the text encoder's states."""
    axes: tuple[int, int, int] = (16, 56, 56)
    """How many values of a head encode a token's place in the text, its row and its column."""
    theta: float = 10000.0
    eps: float = _EPS

    @classmethod
    def base(cls) -> Self:
        """Qwen-Image 2.1, and Turbo, which was distilled from it."""
        return cls(width=4096, depth=32, hidden=3 * 4096)

    @classmethod
    def tiny(cls, text_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(width=64, depth=2, head_dim=32, hidden=192, text_dim=text_dim, axes=image_axes(32))

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture of a file's transformer from native names and shapes, and what its folder states.

        Raises ModelFileError naming a missing tensor, or what is stated otherwise.
        """
        width, channels = _shape(shapes, "img_in.weight")
        (head_dim,) = _shape(shapes, "transformer_blocks.0.attn.norm_q.weight")
        arch = cls(
            width=width,
            depth=block_count(shapes, "transformer_blocks"),
            head_dim=head_dim,
            hidden=_shape(shapes, "transformer_blocks.0.img_mlp.out.weight")[1],
            channels=channels,
            text_dim=_shape(shapes, "txt_in.in_layer.weight")[1],
            axes=stated_axes(stated.values.get("axes_dims_rope"), head_dim, image_axes),
            eps=stated.number("eps", _EPS),
        )
        stated.must(
            patch_size=1,
            out_channels=channels,
            attention_head_dim=head_dim,
            num_attention_heads=width // head_dim,
            mlp_ratio=arch.hidden // width,
            axes_dims_rope=arch.axes,
            causal_condition=True,
        )
        return arch
