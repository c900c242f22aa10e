"""What the vision towers of Qwen2.5-VL and Qwen3-VL share: patches of an image, their places, attention among them.

The sum that runs through all blocks is kept in fp32 at least, as in the text half. Shape letters: B batch, H and W
pixels, N patches, P values of a patch, C channels, E width of a head.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import float16, float32
from flame_train.errors import ShapeError
from flame_train.networks.attention_mlp import attend

CHANNELS: Final = 3
EPS: Final = 1e-6
HEADS: Final = 16
"""Of every published tower; no file of weights has it."""
THETA: Final = 1e4
"""The base of the rotary frequencies."""
Array = np.ndarray[Any, Any]


class Tower(Protocol):
    """The sizes of a tower that its patches and its attention follow from."""

    @property
    def width(self) -> int:
        """Channels of a patch."""

    @property
    def heads(self) -> int:
        """Of the attention."""

    @property
    def patch(self) -> int:
        """Pixels a side."""

    @property
    def frames(self) -> int:
        """Of a film, in one patch; a still image is all of them."""

    @property
    def merge(self) -> int:
        """Patches on each side of a merged token."""


class PatchEmbedding(nn.Module):
    """A convolution whose kernels do not overlap: each patch of each frame to one vector."""

    def __init__(self, arch: Tower, bias: bool = True) -> None:
        self.proj = PatchProjection(arch, bias)


class PatchProjection(nn.Module):
    """One product. The weight has the published shape, (C, 3, frames, patch, patch)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, arch: Tower, bias: bool) -> None:
        self.weight = nn.param(arch.width, CHANNELS, arch.frames, arch.patch, arch.patch)
        self.bias = nn.param(arch.width, init="zeros") if bias else None

    def forward(self, x_BNP: Tensor) -> Tensor:
        weight = nn.compute_copy(self.weight)
        return F.linear(x_BNP, weight.reshape(weight.shape[0], -1), nn.compute_copy(self.bias))


class SelfAttention(nn.Module):
    """Attention among the patches of an image. Queries and keys are turned by their rows and columns."""

    def __init__(self, arch: Tower) -> None:
        self.heads = arch.heads
        self.qkv = nn.Linear(arch.width, 3 * arch.width)
        self.proj = nn.Linear(arch.width, arch.width)

    def forward(
        self, x_BNC: Tensor, turns: tuple[Tensor, Tensor], residual_BNC: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        B, N, C = x_BNC.shape
        q, k, v = F.split(self.qkv(x_BNC), C, dim=2)
        q, k = (F.rope(x.reshape(B, N, self.heads, -1), *turns, interleaved=False).to(x.dtype) for x in (q, k))
        attended = attend(q.reshape(B, N, C), k.reshape(B, N, C), v, self.heads, mask=mask)
        return self.proj(wide(attended), residual_BNC)


def wide(x: Tensor) -> Tensor:
    """Returns fp16 as fp32, as in the text half: what is added to the running sum may go beyond 65504."""
    return x.to(float32) if x.dtype == float16 else x


def normed(norm: nn.LayerNorm | nn.RMSNorm, h_BNC: Tensor) -> Tensor:
    """Normalises in the residual's precision, then in the weights'."""
    made: Tensor = norm(h_BNC)
    return made.to(nn.compute_copy(norm.weight).dtype)


def patch_grid(arch: Tower, images_BHWC: Tensor) -> tuple[int, int]:
    """Returns rows and columns of patches of RGB images (B, H, W, 3).

    Raises ShapeError for sides that are no multiples of a merged token's.
    """
    side, shape = arch.patch * arch.merge, images_BHWC.shape
    if len(shape) != 4 or shape[3] != CHANNELS or any(n % side or n == 0 for n in shape[1:3]):
        raise ShapeError(
            f"VisionTower: expected RGB images (B, H, W, {CHANNELS}) with sides of multiples of {side}, "
            f"got {tuple(shape)}; resize them"
        )
    return shape[1] // arch.patch, shape[2] // arch.patch


def patch_values(arch: Tower, pixels_BHWC: Tensor) -> Tensor:
    """Returns pixels by patch (B, N, 3 * frames * patch * patch), the patches of a group together."""
    B, H, W, _ = pixels_BHWC.shape
    side, sides = arch.patch * arch.merge, (arch.merge, arch.patch)
    grouped = pixels_BHWC.reshape(B, H // side, *sides, W // side, *sides, CHANNELS, 1)
    patches = grouped.permute(0, 1, 4, 2, 5, 7, 8, 3, 6)
    repeated = patches.expand(*(arch.frames if dim == 6 else n for dim, n in enumerate(patches.shape)))
    return repeated.reshape(B, H * W // arch.patch**2, -1)


def places(rows: int, columns: int, merge: int) -> Array:
    """Returns row and column of each patch, (N, 2): groups of `merge` * `merge` row by row, and so within each."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    grouped = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def patch_angles(rows: int, columns: int, head_dim: int, merge: int) -> Array:
    """Returns each number's rotary angle at each patch (arXiv 2104.09864), fp64 (N, E): pairs lie half a head apart.

    A quarter of the head turns by the row and a quarter by the column.
    """
    frequencies = THETA ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    turns = places(rows, columns, merge)[:, :, None] * frequencies
    return np.tile(turns.reshape(len(turns), -1), 2)
