"""The sizes of Qwen-Image 2.1's denoiser, as a file and its folder tell them, and where its tokens stand.

They stand on three axes: in the text, and down and across an image. Shape letters: B batch, E width of a head. There
are L tokens of the image, M of control images and T of the text, S in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.rope import image_axes, rope_angles, stated_axes

FREQUENCIES: Final = 256  # the width of the sinusoid of times
_EPS: Final = 1e-6
_shape: Final = partial(shape_of, "Qwen-Image 2.1", "a Qwen-Image 2.1 transformer")


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
        """Returns Qwen-Image 2.1, and Turbo, which was distilled from it."""
        return cls(width=4096, depth=32, hidden=3 * 4096)

    @classmethod
    def tiny(cls, text_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(width=64, depth=2, head_dim=32, hidden=192, text_dim=text_dim, axes=image_axes(32))

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says."""
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
        stated.require(
            patch_size=1,
            out_channels=channels,
            attention_head_dim=head_dim,
            num_attention_heads=width // head_dim,
            mlp_ratio=arch.hidden // width,
            axes_dims_rope=arch.axes,
            causal_condition=True,
        )
        return arch


_AXES: Final = 3


class _Table(NamedTuple):
    """Cosines, or sines: (M + T, E) of what stands before the image, (T + 1, E0) and (L, E - E0) of its own parts."""

    before: Tensor
    frames: Tensor
    grid: Tensor


@dataclass(frozen=True, slots=True)
class Shown:
    """Control images among the text.

    Attributes:
        grids: of each its rows and columns of tokens.
        starts: how many tokens of the text stand before each.
    """

    grids: tuple[tuple[int, int], ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each."""
        return tuple(rows * columns for rows, columns in self.grids)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each ends among their tokens."""
        return tuple(accumulate(self.sizes))

    @property
    def steps(self) -> tuple[int, ...]:
        """How far each moves on what stands behind it."""
        return tuple(map(max, self.grids))


NONE: Final = Shown()


class Positions:
    """The places of tokens, and what follows from them; one entry a shape, for as long as the model lives.

    A text's token i stands at i on all axes. An image's tokens stand on the first where the next token of the text
    would. On the others they stand at their rows and columns, counted from the middle of the image. What comes behind
    a control image is moved on by its longer side.
    """

    def __init__(self, axes: tuple[int, int, int], theta: float) -> None:
        self.axes, self.theta = axes, theta
        self._tables: dict[tuple[int, tuple[int, int], Shown, DType, str], tuple[_Table, _Table]] = {}
        self._seen: dict[tuple[int, Shown, str], Tensor] = {}

    def placed(
        self, rows_B: Tensor, T: int, grid: tuple[int, int], dtype: DType, shown: Shown = NONE
    ) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine (B, S, 1, E) of the tokens of the image, of control images, and T of the text.

        Args:
            rows_B: how many tokens of the text are a caption's.
            T: tokens of the text, padding included.
            grid: rows and columns of the image's tokens.
            shown: the control images.
        """
        cos, sin = self._table(T, grid, dtype, rows_B.device, shown)
        return _joined(cos, rows_B).unsqueeze(2), _joined(sin, rows_B).unsqueeze(2)

    def seen_by_text(self, T: int, shown: Shown, device: str) -> Tensor:
        """At which tokens of control images and of the text each of T of the text may look, bool (T, M + T)."""
        key = (T, shown, device)
        if key not in self._seen:
            images = [np.arange(T)[:, None] >= np.repeat(s, n) for s, n in zip(shown.starts, shown.sizes, strict=True)]
            self._seen[key] = tensor(np.concatenate([*images, np.tri(T, dtype=bool)], axis=1), device=device)
        return self._seen[key]

    def _table(
        self, text: int, grid: tuple[int, int], dtype: DType, device: str, shown: Shown
    ) -> tuple[_Table, _Table]:
        key = (text, grid, shown, dtype, device)
        if key not in self._tables:
            moved = sum(np.where(np.arange(text) >= s, n, 0) for s, n in zip(shown.starts, shown.steps, strict=True))
            along = np.arange(text) + moved
            before = [
                self._image(own, start + sum(shown.steps[:i]))
                for i, (own, start) in enumerate(zip(shown.grids, shown.starts, strict=True))
            ]
            before.append(rope_angles(np.repeat(along[:, None], _AXES, axis=1), self.axes, self.theta))
            behind = np.arange(text + 1) + sum(shown.steps)
            frames = rope_angles(behind[:, None], self.axes[:1], self.theta)
            parts = np.concatenate(before), frames, self._grid(grid)
            cos, sin = (_Table(*(tensor(turn(x), dtype, device) for x in parts)) for turn in (np.cos, np.sin))
            self._tables[key] = cos, sin
        return self._tables[key]

    def _grid(self, grid: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Angles of an image's tokens on its own two axes, (L, E - E0)."""
        down, across = (np.arange(n) - (n - n // 2) for n in grid)
        places = np.stack([np.repeat(down, grid[1]), np.tile(across, grid[0])], axis=1)
        return rope_angles(places, self.axes[1:], self.theta)

    def _image(self, grid: tuple[int, int], frame: int) -> np.ndarray[Any, Any]:
        """Angles of a control image's tokens, (its own, E)."""
        own = self._grid(grid)
        frames = rope_angles(np.full((len(own), 1), frame), self.axes[:1], self.theta)
        return np.concatenate([frames, own], axis=1)


def _joined(table: _Table, rows_B: Tensor) -> Tensor:
    """Returns the table's values (B, S, E): the image's, which follow so many of the text, and the others'."""
    B, (N, E), (L, _) = rows_B.shape[0], table.before.shape, table.grid.shape
    frames = F.embedding(rows_B, table.frames).unsqueeze(1).expand(B, L, table.frames.shape[1])
    image = F.cat([frames, table.grid.unsqueeze(0).expand(B, *table.grid.shape)], dim=2)
    return F.cat([image, table.before.unsqueeze(0).expand(B, N, E)], dim=1)
