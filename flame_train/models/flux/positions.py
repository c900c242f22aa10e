"""The rotary positions of Flux.1's tokens (arXiv 2104.09864): text at the origin, the image by rows and columns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine.dtype import DType, compute_dtype

_THETA: Final = 10000.0


def axes_of(head_dim: int) -> tuple[int, int, int]:
    """How many values of a head encode the image (always 0 here), the row and the column of a token."""
    each = head_dim * 7 // 16 // 2 * 2  # 56 of 128
    return head_dim - 2 * each, each, each


def position_angles(head_dim: int, text: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """The angle by which each number of a head is turned at each token, fp64 (S, E); text stands at the origin.

    Each axis has frequencies 10000^(-2i / its numbers), each for two neighbouring numbers (BFL's flux.math.rope).
    """
    ids = np.zeros((text + rows * columns, 3))
    ids[text:, 1] = np.repeat(np.arange(rows), columns)
    ids[text:, 2] = np.tile(np.arange(columns), rows)
    turns = [np.outer(ids[:, i], _THETA ** (-np.arange(0, n, 2) / n)) for i, n in enumerate(axes_of(head_dim))]
    return np.repeat(np.concatenate(turns, axis=1), 2, axis=1)


class Positions:
    """Cosines and sines of `position_angles`, of every shape that came."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        # one entry a shape, for as long as the model lives: captured steps read them at their addresses
        self._turns: dict[tuple[int, int, int, DType, str], tuple[Tensor, Tensor]] = {}

    def turns(self, text: int, rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, (S, 1, E), in fp32 at least, on the device of a weight."""
        key = text, rows, columns, like.dtype, like.device
        if key not in self._turns:
            angles = position_angles(self.head_dim, text, rows, columns)[:, None]
            dtype = compute_dtype(like.dtype)
            self._turns[key] = tensor(np.cos(angles), dtype, like.device), tensor(np.sin(angles), dtype, like.device)
        return self._turns[key]
