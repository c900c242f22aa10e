"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): an image to tokens that the text half reads.

It is a vision transformer with rotary positions. Most of its blocks attend within windows of 112 pixels. Attribute
names are those of transformers below `model.visual.` (`blocks.0.mlp.gate_proj.weight`). Shape letters: B batch, H and W
pixels, N patches, M merged tokens, C channels, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Final, NamedTuple, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype
from flame_train.errors import ModelFileError
from flame_train.networks.arch import block_count, shape_of_encoder
from flame_train.networks.block_network import Block, BlockNetwork
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.text_encoders.qwen3.vision_parts import (
    CHANNELS,
    EPS,
    HEADS,
    THETA,
    Array,
    PatchEmbedding,
    SelfAttention,
    normed,
    patch_angles,
    patch_grid,
    patch_values,
    places,
    wide,
)

_EVERY: Final = 8  # of so many blocks the last one attends to the whole image
_WINDOW: Final = 8  # patches on each side of a window
# of pixels of 0 to 1, by channel: CLIP's
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_shape: Final = partial(shape_of_encoder, "the vision tower of a Qwen2.5-VL")


@dataclass(frozen=True, slots=True)
class Vision25Arch:
    """The tower's shapes."""

    width: int
    layers: int
    heads: int
    hidden: int
    out_width: int
    """The text half's width."""
    whole: tuple[int, ...]
    """The blocks that attend to the whole image, counted from 0."""
    patch: int = 14
    frames: int = 2
    merge: int = 2
    window: int = _WINDOW

    @classmethod
    def b7(cls) -> Self:
        """Returns that of Qwen2.5-VL-7B."""
        return cls(1280, 32, HEADS, 3420, 3584, _whole(32))

    @classmethod
    def tiny(cls, out_width: int = 256) -> Self:
        """Returns the same structure, small enough for a CPU."""
        return cls(64, 2, HEADS, 96, out_width, _whole(2))

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Returns the architecture of a file's tower, from its native names and shapes, and what its folder states.

        Raises ModelFileError naming a missing tensor, or what the folder states and this code cannot do.
        """
        stated = stated.within("vision_config")
        width, channels, frames, patch, _ = _shape(shapes, "patch_embed.proj.weight", 5)
        layers = block_count(shapes, "blocks")
        out_width, merged = _shape(shapes, "merger.mlp.2.weight", 2)
        arch = cls(
            width=width,
            layers=layers,
            heads=int(stated.number("num_heads", HEADS)),
            hidden=_shape(shapes, "blocks.0.mlp.gate_proj.weight", 2)[0],
            out_width=out_width,
            whole=stated.whole_numbers("fullatt_block_indexes", _whole(layers)),
            patch=patch,
            frames=frames,
            merge=isqrt(merged // width),
        )
        stated.require(
            depth=layers,
            hidden_size=width,
            intermediate_size=arch.hidden,
            out_hidden_size=out_width,
            patch_size=patch,
            temporal_patch_size=frames,
            spatial_merge_size=arch.merge,
            in_channels=CHANNELS,
            window_size=patch * _WINDOW,
            hidden_act="silu",
        )
        stated.within("rope_parameters").require(rope_type="axial", rope_theta=THETA)
        if channels != CHANNELS or width % (4 * arch.heads):
            raise ModelFileError(
                f"vision tower: {channels} channels and {arch.heads} heads of {width} values, expected {CHANNELS} and "
                "multiples of 4: this is a variant that is not supported here"
            )
        return arch


def _whole(layers: int) -> tuple[int, ...]:
    """Returns the published blocks that attend to the whole image: 7, 15, 23 and 31 of 32."""
    return tuple(range(_EVERY - 1, layers, _EVERY))


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu(gate x) * up x, projected back, with biases."""

    def __init__(self, arch: Vision25Arch) -> None:
        self.gate_proj, self.up_proj = (nn.Linear(arch.width, arch.hidden) for _ in range(2))
        self.down_proj = nn.Linear(arch.hidden, arch.width)

    def forward(self, x_BNC: Tensor, residual_BNC: Tensor) -> Tensor:
        return self.down_proj(F.silu(wide(self.gate_proj(x_BNC))) * wide(self.up_proj(x_BNC)), residual_BNC)


class VisionBlock(Block):
    """Attention and the gated network, each behind a norm and around a residual."""

    has_feed_forward = False

    def __init__(self, arch: Vision25Arch) -> None:
        self.norm1, self.norm2 = (nn.RMSNorm(arch.width, EPS) for _ in range(2))
        self.attn = SelfAttention(arch)
        self.mlp = Mlp(arch)

    def forward(self, h_BNC: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, mask: Tensor | None) -> Tensor:
        h_BNC = self.attn(normed(self.norm1, h_BNC), (cos_N1E, sin_N1E), h_BNC, mask)
        return self.mlp(normed(self.norm2, h_BNC), h_BNC)


class Merger(nn.Module):
    """Square groups of patches, one after another, to one token each."""

    def __init__(self, arch: Vision25Arch) -> None:
        self.merged = arch.width * arch.merge**2
        self.ln_q = nn.RMSNorm(arch.width, EPS)
        self.mlp = nn.ModuleList([nn.Linear(self.merged, self.merged), None, nn.Linear(self.merged, arch.out_width)])

    def forward(self, h_BNC: Tensor) -> Tensor:
        x_BMC = normed(self.ln_q, h_BNC).reshape(h_BNC.shape[0], -1, self.merged)
        return self.mlp[2](F.gelu(self.mlp[0](x_BMC)))


class Tables(NamedTuple):
    """What depends on an image's size alone. A captured call cannot bring it from the host."""

    cos: Tensor
    """Of the rotary angles, (N, 1, E)."""
    sin: Tensor
    windows: Tensor
    """Which patch may look at which within its window, bool (1, 1, N, N)."""
    mean: Tensor
    """Of pixels, by channel."""
    std: Tensor


class VisionTower25(BlockNetwork):
    """Images to tokens of the text half's width."""

    def __init__(self, arch: Vision25Arch) -> None:
        self.arch = arch
        self.patch_embed = PatchEmbedding(arch, bias=False)
        self.blocks = nn.ModuleList([VisionBlock(arch) for _ in range(arch.layers)])
        self.merger = Merger(arch)
        self._tables: dict[tuple[int, int], Tables] = {}

    def forward(self, images_BHWC: Tensor) -> tuple[Tensor]:
        """Returns the images' tokens (B, M, out_width), in the weights' dtype.

        Tokens go row by row. Images are RGB of 0 to 255, (B, H, W, 3); M is H / 28 * W / 28. Raises ShapeError for
        sides that are no multiples of 28.
        """
        dtype = nn.compute_copy(self.patch_embed.proj.weight).dtype
        exact, tables = compute_dtype(dtype), self._of(*patch_grid(self.arch, images_BHWC))
        pixels = (images_BHWC.to(exact) - tables.mean) / tables.std
        h_BNC = self.patch_embed.proj(patch_values(self.arch, pixels.to(dtype))).to(exact)
        for i, block in enumerate(self.blocks):
            h_BNC = block(h_BNC, tables.cos, tables.sin, None if i in self.arch.whole else tables.windows)
        return (self.merger(h_BNC),)

    def _of(self, rows: int, columns: int) -> Tables:
        """Returns the tables of an image of so many patches."""
        if (rows, columns) not in self._tables:
            arch, like = self.arch, self.patch_embed.proj.weight
            angles = patch_angles(rows, columns, arch.width // arch.heads, arch.merge)[:, None]
            mean, std = (np.multiply(255.0, numbers) for numbers in (_MEAN, _STD))
            cos, sin, mean, std = (
                tensor(array, compute_dtype(like.dtype), like.device)
                for array in (np.cos(angles), np.sin(angles), mean, std)
            )
            windows = tensor(window_mask(rows, columns, arch.merge, arch.window)[None, None], device=like.device)
            self._tables[rows, columns] = Tables(cos, sin, windows, mean, std)
        return self._tables[rows, columns]


def window_mask(rows: int, columns: int, merge: int, window: int) -> Array:
    """Returns which patches share a window, bool (N, N): windows begin at the top left, and end at the edges."""
    of_N2 = places(rows, columns, merge) // window
    return np.asarray((of_N2[:, None] == of_N2[None]).all(-1))
