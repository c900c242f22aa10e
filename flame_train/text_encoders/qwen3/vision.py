"""The vision tower of Qwen3-VL (arXiv 2511.21631): an image to tokens that the text half reads.

It is a vision transformer (arXiv 2010.11929) with rotary positions. Some layers' states leave it as well: DeepStack
(arXiv 2406.04334). Attribute names are those of transformers below `model.visual.` (`blocks.0.attn.qkv.weight`). Shape
letters: B batch, H and W pixels, N patches, P values of a patch, M merged tokens, C channels, E width of a head.
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

_TAPS: Final = {27: (8, 16, 24), 24: (5, 11, 17)}
"""The published towers' by depth."""
_shape: Final = partial(shape_of_encoder, "the vision tower of a Qwen3-VL")


@dataclass(frozen=True, slots=True)
class VisionArch:
    """The tower's shapes."""

    width: int
    layers: int
    heads: int
    hidden: int
    out_width: int
    """The text half's width."""
    taps: tuple[int, ...]
    """The blocks whose states leave the tower beside the last one's, counted from 0."""
    patch: int = 16
    frames: int = 2
    """Of a film, in one patch; a still image is all of them."""
    merge: int = 2
    """Patches on each side of a merged token."""
    positions: int = 2304
    """Rows of the position table, a square grid."""

    @classmethod
    def b8(cls) -> Self:
        """Returns that of Qwen3-VL-8B."""
        return cls(1152, 27, HEADS, 4304, 4096, _TAPS[27])

    @classmethod
    def b4(cls) -> Self:
        """Returns that of Qwen3-VL-4B."""
        return cls(1024, 24, HEADS, 4096, 2560, _TAPS[24])

    @classmethod
    def tiny(cls, out_width: int = 32) -> Self:
        """Returns the same structure, small enough for a CPU."""
        return cls(64, 4, HEADS, 96, out_width, _usual_taps(4, 3), positions=36)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Returns the architecture of a file's tower, from its native names and shapes, and what its folder states.

        Raises ModelFileError naming a missing tensor, or what the folder states and this code cannot do.
        """
        stated = stated.within("vision_config")
        width, channels, frames, patch, _ = _shape(shapes, "patch_embed.proj.weight", 5)
        layers, mergers = (block_count(shapes, name) for name in ("blocks", "deepstack_merger_list"))
        out_width, merged = _shape(shapes, "merger.linear_fc2.weight", 2)
        arch = cls(
            width=width,
            layers=layers,
            heads=int(stated.number("num_heads", HEADS)),
            hidden=_shape(shapes, "blocks.0.mlp.linear_fc1.weight", 2)[0],
            out_width=out_width,
            taps=stated.whole_numbers("deepstack_visual_indexes", _usual_taps(layers, mergers)),
            patch=patch,
            frames=frames,
            merge=isqrt(merged // width),
            positions=_shape(shapes, "pos_embed.weight", 2)[0],
        )
        stated.require(
            depth=layers,
            hidden_size=width,
            intermediate_size=arch.hidden,
            out_hidden_size=out_width,
            num_position_embeddings=arch.positions,
            patch_size=patch,
            temporal_patch_size=frames,
            spatial_merge_size=arch.merge,
            in_channels=CHANNELS,
            hidden_act="gelu_pytorch_tanh",
        )
        stated.within("rope_parameters").require(rope_type="axial", rope_theta=THETA)
        arch.check(channels, mergers)
        return arch

    def check(self, channels: int, mergers: int) -> None:
        """Raises ModelFileError for a tower of so many `channels` and `mergers` of taps that this code cannot run."""
        in_order = tuple(i for i in range(self.layers) if i in self.taps)
        checks = (
            (channels == CHANNELS, f"{channels} channels, expected {CHANNELS}"),
            (self.width % (4 * self.heads) == 0, f"{self.heads} heads of {self.width} values, expected multiples of 4"),
            (isqrt(self.positions) ** 2 == self.positions, f"{self.positions} positions, expected a square number"),
            (
                self.taps == in_order and len(in_order) == mergers,
                f"deepstack_visual_indexes {list(self.taps)}, expected {mergers} of {self.layers} blocks in order",
            ),
        )
        wrong = [words for holds, words in checks if not holds]
        if wrong:
            raise ModelFileError(f"vision tower: {'; '.join(wrong)}: this is a variant that is not supported here")


def _usual_taps(layers: int, taps: int) -> tuple[int, ...]:
    """Returns the blocks that are tapped where no folder states it: the published ones, or evenly spread ones."""
    usual = _TAPS.get(layers, ())
    return usual if len(usual) == taps else tuple(layers * i // (taps + 1) for i in range(1, taps + 1))


class Mlp(nn.Module):
    """The two-layer network; gelu is the tanh formula."""

    def __init__(self, arch: VisionArch) -> None:
        self.linear_fc1 = nn.Linear(arch.width, arch.hidden)
        self.linear_fc2 = nn.Linear(arch.hidden, arch.width)

    def forward(self, x_BNC: Tensor, residual_BNC: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(wide(self.linear_fc1(x_BNC)), approximate="tanh"), residual_BNC)


class VisionBlock(Block):
    """Attention and network, each behind a layer norm and around a residual."""

    has_feed_forward = False

    def __init__(self, arch: VisionArch) -> None:
        self.norm1, self.norm2 = (nn.LayerNorm(arch.width, EPS) for _ in range(2))
        self.attn = SelfAttention(arch)
        self.mlp = Mlp(arch)

    def forward(self, h_BNC: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
        h_BNC = self.attn(normed(self.norm1, h_BNC), (cos_N1E, sin_N1E), h_BNC)
        return self.mlp(normed(self.norm2, h_BNC), h_BNC)


class Merger(nn.Module):
    """Square groups of patches, one after another, to one token each. That of a tap normalises a whole group."""

    def __init__(self, arch: VisionArch, of_tap: bool) -> None:
        self.merged = arch.width * arch.merge**2
        self.of_tap = of_tap
        self.norm = nn.LayerNorm(self.merged if of_tap else arch.width, EPS)
        self.linear_fc1 = nn.Linear(self.merged, self.merged)
        self.linear_fc2 = nn.Linear(self.merged, arch.out_width)

    def forward(self, h_BNC: Tensor) -> Tensor:
        B = h_BNC.shape[0]
        grouped = h_BNC.reshape(B, -1, self.merged) if self.of_tap else h_BNC
        x_BMC = normed(self.norm, grouped).reshape(B, -1, self.merged)
        return self.linear_fc2(F.gelu(self.linear_fc1(x_BMC)))


class Tables(NamedTuple):
    """What depends on an image's size alone. A captured call cannot bring it from the host."""

    places: Tensor
    """Rows of the position table around each patch, (N, 4)."""
    shares: Tensor
    """Their shares in its position, (N, 4, 1)."""
    cos: Tensor
    """Of the rotary angles, (N, 1, E)."""
    sin: Tensor


class VisionTower(BlockNetwork):
    """Images to tokens of the text half's width."""

    def __init__(self, arch: VisionArch) -> None:
        self.arch = arch
        self.patch_embed = PatchEmbedding(arch)
        self.pos_embed = nn.Embedding(arch.positions, arch.width)
        self.blocks = nn.ModuleList([VisionBlock(arch) for _ in range(arch.layers)])
        self.merger = Merger(arch, of_tap=False)
        self.deepstack_merger_list = nn.ModuleList([Merger(arch, of_tap=True) for _ in arch.taps])
        self._tables: dict[tuple[int, int], Tables] = {}

    def forward(self, images_BHWC: Tensor) -> tuple[Tensor, ...]:
        """Returns the images' tokens, and those of each tap, (B, M, out_width) each, in the weights' dtype.

        Tokens go row by row. Images are RGB of 0 to 255, (B, H, W, 3); M is H / 32 * W / 32. Raises ShapeError for
        sides that are no multiples of 32.
        """
        dtype = nn.compute_copy(self.pos_embed.weight).dtype
        tables = self._of(*patch_grid(self.arch, images_BHWC))
        pixels = (images_BHWC.to(compute_dtype(dtype)) - 127.5) / 127.5
        h_BNC = self.patch_embed.proj(patch_values(self.arch, pixels.to(dtype)))
        h_BNC = h_BNC.to(compute_dtype(h_BNC.dtype)) + self._positions(tables)
        tapped: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            h_BNC = block(h_BNC, tables.cos, tables.sin)
            if i in self.arch.taps:
                tapped.append(self.deepstack_merger_list[len(tapped)](h_BNC))
        return self.merger(h_BNC), *tapped

    def _positions(self, tables: Tables) -> Tensor:
        found_N4C: Tensor = self.pos_embed(tables.places)
        return (found_N4C.to(tables.shares.dtype) * tables.shares).sum(1)

    def _of(self, rows: int, columns: int) -> Tables:
        """Returns the tables of an image of so many patches."""
        if (rows, columns) not in self._tables:
            arch, like = self.arch, self.pos_embed.weight
            places_N4, shares_N4 = interpolation(rows, columns, isqrt(arch.positions), arch.merge)
            angles = patch_angles(rows, columns, arch.width // arch.heads, arch.merge)[:, None]
            floats = shares_N4[..., None], np.cos(angles), np.sin(angles)
            tensors = (tensor(array, compute_dtype(like.dtype), like.device) for array in floats)
            self._tables[rows, columns] = Tables(tensor(places_N4, device=like.device), *tensors)
        return self._tables[rows, columns]


def interpolation(rows: int, columns: int, side: int, merge: int) -> tuple[Array, Array]:
    """Gives the four entries of a table of `side` * `side` positions around each patch, and their shares, both (N, 4).

    Interpolation is bilinear. The image's corners have the table's.
    """
    at_N2 = places(rows, columns, merge) * (side - 1) / np.maximum([rows - 1, columns - 1], 1)
    low_N2 = np.floor(at_N2).astype(np.int32)
    between_N2 = at_N2 - low_N2
    ends_2N2 = low_N2, np.minimum(low_N2 + 1, side - 1)
    shares_2N2 = 1 - between_N2, between_N2
    corners = [(i, j) for i in range(2) for j in range(2)]
    index_N4 = np.stack([ends_2N2[i][:, 0] * side + ends_2N2[j][:, 1] for i, j in corners], axis=1)
    shares_N4 = np.stack([shares_2N2[i][:, 0] * shares_2N2[j][:, 1] for i, j in corners], axis=1)
    return index_N4.astype(np.int32), shares_N4
