"""Where Qwen-Image 2.1's tokens stand on three axes: in the text, and down and across the image from its centre.

Shape letters: B batch, L image tokens, T text tokens, S = T + L, E width of a head.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.models.common.rope import rope_angles

_AXES: Final = 3


class _Table(NamedTuple):
    """Cosines, or sines: (T, E) of the text's tokens, (T + 1, E0) and (L, E - E0) of image tokens' two parts."""

    text: Tensor
    frames: Tensor
    grid: Tensor


class Positions:
    """The places of tokens, and what follows from them; one entry a shape, for as long as the model lives.

    A text's token i stands at i on all axes. An image's tokens stand at the length of its text on the first. On the
    others they stand at their rows and columns, counted from the middle of the image.
    """

    def __init__(self, axes: tuple[int, int, int], theta: float) -> None:
        self.axes, self.theta = axes, theta
        self._tables: dict[tuple[int, int, int, DType, str], tuple[_Table, _Table]] = {}

    def placed(self, rows_B: Tensor, T: int, grid: tuple[int, int], dtype: DType) -> tuple[Tensor, Tensor]:
        """Cosine and sine (B, S, 1, E) of the image's tokens and T of the text, of which `rows_B` are a caption's."""
        cos, sin = self._table(T, grid, dtype, rows_B.device)
        return _joined(cos, rows_B).unsqueeze(2), _joined(sin, rows_B).unsqueeze(2)

    def _table(self, text: int, grid: tuple[int, int], dtype: DType, device: str) -> tuple[_Table, _Table]:
        """Cosines and sines of places."""
        (rows, columns), key = grid, (text, *grid, dtype, device)
        if key not in self._tables:
            along = np.repeat(np.arange(text + 1)[:, None], _AXES, axis=1)
            down, across = (np.arange(n) - (n - n // 2) for n in (rows, columns))
            places = np.stack([np.repeat(down, columns), np.tile(across, rows)], axis=1)
            words = rope_angles(along, self.axes, self.theta)
            pixels = rope_angles(places, self.axes[1:], self.theta)
            parts = words[:text], words[:, : self.axes[0]], pixels
            cos, sin = (_Table(*(tensor(turn(x), dtype, device) for x in parts)) for turn in (np.cos, np.sin))
            self._tables[key] = cos, sin
        return self._tables[key]


def _joined(table: _Table, rows_B: Tensor) -> Tensor:
    """The table's values for all tokens, (B, S, E): the image's, which follow so many of the text, and the text's."""
    B, (T, E), (L, _) = rows_B.shape[0], table.text.shape, table.grid.shape
    frames = F.embedding(rows_B, table.frames).unsqueeze(1).expand(B, L, table.frames.shape[1])
    image = F.cat([frames, table.grid.unsqueeze(0).expand(B, *table.grid.shape)], dim=2)
    return F.cat([image, table.text.unsqueeze(0).expand(B, T, E)], dim=1)
