"""The vision tower of Qwen3-VL (arXiv 2511.21631): an image to tokens that the text half reads.

It is a vision transformer (arXiv 2010.11929) with rotary positions. Some layers' states leave it as well: DeepStack
(arXiv 2406.04334). Attribute names are those of transformers below `model.visual.` (`blocks.0.attn.qkv.weight`). The
sum that runs through all blocks is kept in fp32 at least, as in the text half. Shape letters: B batch, H and W pixels,
N patches, P values of a patch, M merged tokens, C channels, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any, Final, NamedTuple, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype, float16, float32
from flame_train.errors import ModelFileError, ShapeError
from flame_train.networks.arch import block_count, shape_of_encoder
from flame_train.networks.attention_mlp import attend
from flame_train.networks.block_network import Block, BlockNetwork
from flame_train.networks.files.stated import NOTHING, Stated

CHANNELS: Final = 3
EPS: Final = 1e-6
_THETA: Final = 1e4
"""The base of the rotary frequencies."""
HEADS: Final = 16
"""Of every published tower; no file of weights has it."""
_TAPS: Final = {27: (8, 16, 24), 24: (5, 11, 17)}
"""The published towers' by depth."""
_Array = np.ndarray[Any, Any]
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
        stated.within("rope_parameters").require(rope_type="axial", rope_theta=_THETA)
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


class PatchEmbedding(nn.Module):
    """A convolution whose kernels do not overlap: each patch of each frame to one vector."""

    def __init__(self, arch: VisionArch) -> None:
        self.proj = PatchProjection(arch)


class PatchProjection(nn.Module):
    """One product. The weight has the published shape, (C, 3, frames, patch, patch)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, arch: VisionArch) -> None:
        self.weight = nn.param(arch.width, CHANNELS, arch.frames, arch.patch, arch.patch)
        self.bias = nn.param(arch.width, init="zeros")

    def forward(self, x_BNP: Tensor) -> Tensor:
        weight = nn.compute_copy(self.weight)
        return F.linear(x_BNP, weight.reshape(weight.shape[0], -1), nn.compute_copy(self.bias))


class SelfAttention(nn.Module):
    """Attention among all patches of an image. Queries and keys are turned by their rows and columns."""

    def __init__(self, arch: VisionArch) -> None:
        self.heads = arch.heads
        self.qkv = nn.Linear(arch.width, 3 * arch.width)
        self.proj = nn.Linear(arch.width, arch.width)

    def forward(self, x_BNC: Tensor, turns: tuple[Tensor, Tensor], residual_BNC: Tensor) -> Tensor:
        B, N, C = x_BNC.shape
        q, k, v = F.split(self.qkv(x_BNC), C, dim=2)
        q, k = (F.rope(x.reshape(B, N, self.heads, -1), *turns, interleaved=False).to(x.dtype) for x in (q, k))
        return self.proj(_wide(attend(q.reshape(B, N, C), k.reshape(B, N, C), v, self.heads)), residual_BNC)


class Mlp(nn.Module):
    """The two-layer network; gelu is the tanh formula."""

    def __init__(self, arch: VisionArch) -> None:
        self.linear_fc1 = nn.Linear(arch.width, arch.hidden)
        self.linear_fc2 = nn.Linear(arch.hidden, arch.width)

    def forward(self, x_BNC: Tensor, residual_BNC: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(_wide(self.linear_fc1(x_BNC)), approximate="tanh"), residual_BNC)


def _wide(x: Tensor) -> Tensor:
    """Returns fp16 as fp32, as in the text half: what is added to the running sum may go beyond 65504."""
    return x.to(float32) if x.dtype == float16 else x


class VisionBlock(Block):
    """Attention and network, each behind a layer norm and around a residual."""

    has_feed_forward = False

    def __init__(self, arch: VisionArch) -> None:
        self.norm1, self.norm2 = (nn.LayerNorm(arch.width, EPS) for _ in range(2))
        self.attn = SelfAttention(arch)
        self.mlp = Mlp(arch)

    def forward(self, h_BNC: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
        h_BNC = self.attn(_normed(self.norm1, h_BNC), (cos_N1E, sin_N1E), h_BNC)
        return self.mlp(_normed(self.norm2, h_BNC), h_BNC)


def _normed(norm: nn.LayerNorm, h_BNC: Tensor) -> Tensor:
    """Normalises in the residual's precision, then in the weights'."""
    normed: Tensor = norm(h_BNC)
    return normed.to(nn.compute_copy(norm.weight).dtype)


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
        x_BMC = _normed(self.norm, grouped).reshape(B, -1, self.merged)
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
        side = self.arch.patch * self.arch.merge
        shape = images_BHWC.shape
        if len(shape) != 4 or shape[3] != CHANNELS or any(n % side or n == 0 for n in shape[1:3]):
            raise ShapeError(
                f"VisionTower: expected RGB images (B, H, W, {CHANNELS}) with sides of multiples of {side}, "
                f"got {tuple(shape)}; resize them"
            )
        tables = self._of(shape[1] // self.arch.patch, shape[2] // self.arch.patch)
        h_BNC = self.patch_embed.proj(self._patches(images_BHWC))
        h_BNC = h_BNC.to(compute_dtype(h_BNC.dtype)) + self._positions(tables)
        tapped: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            h_BNC = block(h_BNC, tables.cos, tables.sin)
            if i in self.arch.taps:
                tapped.append(self.deepstack_merger_list[len(tapped)](h_BNC))
        return self.merger(h_BNC), *tapped

    def _patches(self, images_BHWC: Tensor) -> Tensor:
        """Returns values of -1 to 1 by patch (B, N, 3 * frames * patch * patch), the patches of a group together."""
        arch = self.arch
        B, H, W, _ = images_BHWC.shape
        dtype = nn.compute_copy(self.pos_embed.weight).dtype
        scaled = ((images_BHWC.to(compute_dtype(dtype)) - 127.5) / 127.5).to(dtype)
        side = arch.merge, arch.patch
        grouped = scaled.reshape(B, H // (side[0] * side[1]), *side, W // (side[0] * side[1]), *side, CHANNELS, 1)
        patches = grouped.permute(0, 1, 4, 2, 5, 7, 8, 3, 6)
        repeated = patches.expand(*(arch.frames if dim == 6 else n for dim, n in enumerate(patches.shape)))
        return repeated.reshape(B, H * W // arch.patch**2, -1)

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


def places(rows: int, columns: int, merge: int) -> _Array:
    """Returns row and column of each patch, (N, 2): groups of `merge` * `merge` row by row, and so within each."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    grouped = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def patch_angles(rows: int, columns: int, head_dim: int, merge: int) -> _Array:
    """Returns each number's rotary angle at each patch (arXiv 2104.09864), fp64 (N, E): pairs lie half a head apart.

    A quarter of the head turns by the row and a quarter by the column.
    """
    frequencies = _THETA ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    turns = places(rows, columns, merge)[:, :, None] * frequencies
    return np.tile(turns.reshape(len(turns), -1), 2)


def interpolation(rows: int, columns: int, side: int, merge: int) -> tuple[_Array, _Array]:
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
