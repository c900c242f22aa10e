"""Where Z-Image's tokens stand: which text is seen, and by which angles queries and keys are turned.

Shape letters: B batch, L image tokens, T text tokens, S all tokens, E width of a head.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, float32, int32

UNIT: Final = 32  # a sequence's length is a multiple of this


def angles(places: np.ndarray[Any, Any], dim: int, theta: float) -> np.ndarray[Any, Any]:
    """The angle of each of an axis's `dim` numbers at each place, fp64 (n, dim): two neighbours share one."""
    return np.repeat(np.outer(places, theta ** (-np.arange(0, dim, 2) / dim)), 2, axis=1)


class Turns(NamedTuple):
    """Cosine and sine (B, S, 1, E) of each token's rotary angles, those of the image first."""

    cos: Tensor
    sin: Tensor

    def part(self, begin: int, end: int) -> Turns:
        """Returns those of some tokens in a row."""
        return Turns(self.cos[:, begin:end], self.sin[:, begin:end])


class _Table(NamedTuple):
    """Cosines, or sines: (n, E0) of each place in the text, and (1, L, E - E0) of image tokens' rows and columns."""

    text: Tensor
    image: Tensor


class Positions:
    """The places of tokens on three axes: in the text, down and across the image."""

    def __init__(self, axes: tuple[int, int, int], theta: float) -> None:
        self.axes, self.theta = axes, theta
        # one entry a shape, for as long as the model lives: captured steps read them at their addresses
        self._tables: dict[tuple[int, int, int, DType, str], tuple[_Table, _Table, Tensor]] = {}

    def placed(self, rows_B: Tensor, T: int, grid: tuple[int, int], dtype: DType) -> tuple[Tensor, Tensor, Turns]:
        """Which of T text tokens are a caption's, bool (B, T), how many are seen, int32 (B,), and all rotary angles.

        A caption of n tokens takes the positions 1 to N, where N is n rounded up to a multiple of 32. The image's
        tokens have position N + 1 and their rows and columns. Tokens that fill the image up have position 0.
        """
        (B,) = rows_B.shape
        cos, sin, places_1T = self._table(T, grid, dtype, rows_B.device)
        own_B1 = rows_B.to(float32).reshape(B, 1)
        filled_B1 = F.ceil(own_B1 * (1.0 / UNIT)) * float(UNIT)
        filled_B = filled_B1.to(int32).reshape(B)
        return (
            places_1T <= own_B1,
            filled_B,
            Turns(*(_joined(table, filled_B + 1, T, grid[0] * grid[1]).unsqueeze(2) for table in (cos, sin))),
        )

    def _table(self, text: int, grid: tuple[int, int], dtype: DType, device: str) -> tuple[_Table, _Table, Tensor]:
        """Cosines and sines of places, and the text's places 1 to T, fp32 (1, T)."""
        (rows, columns), key = grid, (text, *grid, dtype, device)
        if key not in self._tables:
            a, theta = self.axes, self.theta
            first = angles(np.arange(text + 2), a[0], theta)
            down = angles(np.repeat(np.arange(rows), columns), a[1], theta)
            across = angles(np.tile(np.arange(columns), rows), a[2], theta)
            both = np.concatenate([down, across], axis=1)[None]
            cos, sin = (_Table(*(tensor(turn(x), dtype, device) for x in (first, both))) for turn in (np.cos, np.sin))
            places = tensor(np.arange(1, text + 1, dtype=np.float32)[None], device=device)
            self._tables[key] = cos, sin, places
        return self._tables[key]


def _joined(table: _Table, image_B: Tensor, T: int, L: int) -> Tensor:
    """The table's values for all tokens, (B, S, E): L image tokens at their captions' places, filled up, and text."""
    B, first, rest = image_B.shape[0], table.text.shape[1], table.image.shape[2]
    at_B1E = F.embedding(image_B, table.text).unsqueeze(1)
    still = F.cat([table.text[:1], table.image[:, :1].reshape(1, rest)], dim=1)  # at the origin
    image = F.cat([at_B1E.expand(B, L, first), table.image.expand(B, L, rest)], dim=2)
    filling = still.unsqueeze(0).expand(B, -L % UNIT, first + rest)
    text = F.cat([table.text[1 : T + 1], still[:, first:].expand(T, rest)], dim=1)
    return F.cat([image, filling, text.unsqueeze(0).expand(B, T, first + rest)], dim=1)
