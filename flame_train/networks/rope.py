"""Rotary position embedding (arXiv 2104.09864) on several axes: angles, and tables of their cosines and sines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine.dtype import DType, compute_dtype

Angles = np.ndarray[Any, Any]

Grids = tuple[tuple[int, int], ...]
"""Rows and columns of tokens: of the image, then of each control image."""


def rope_angles(positions: Angles, axes: Sequence[int], theta: float) -> Angles:
    """Returns the angle by which each value of a head is rotated at each token, fp64 (S, E); two neighbours share one.

    Args:
        positions: each token's position on each axis (S, A).
        axes: how many values of a head each axis has; E is their sum. The frequencies are theta^(-2i / values).
        theta: the base of the frequencies.
    """
    turns = [np.outer(positions[:, i], theta ** (-np.arange(0, n, 2) / n)) for i, n in enumerate(axes)]
    return np.repeat(np.concatenate(turns, axis=1), 2, axis=1)


def grid(rows: int, columns: int, image: int = 0) -> Angles:
    """Positions (rows * columns, 3) of an image's tokens: (image, row, column)."""
    positions = np.full((rows * columns, 3), float(image))
    positions[:, 1] = np.repeat(np.arange(rows), columns)
    positions[:, 2] = np.tile(np.arange(columns), rows)
    return positions


def published_axes(head_dim: int) -> tuple[int, int, int]:
    """How many values of a head encode a token's place in the text, its row and its column: 32, 48 and 48 of 128."""
    each = head_dim * 3 // 8 // 2 * 2
    return head_dim - 2 * each, each, each


def image_axes(head_dim: int) -> tuple[int, int, int]:
    """Returns how many values of a head encode a token's image, its row and its column: 16, 56 and 56 of 128."""
    each = head_dim * 7 // 16 // 2 * 2
    return head_dim - 2 * each, each, each


def film_axes(head_dim: int) -> tuple[int, int, int]:
    """Returns how many values of a head encode a token's frame, its row and its column: 44, 42 and 42 of 128."""
    each = head_dim // 6 * 2
    return head_dim - 2 * each, each, each


def stated_axes(
    stated: object, head_dim: int, usual: Callable[[int], tuple[int, int, int]] = published_axes
) -> tuple[int, int, int]:
    """Returns the axes that a folder states, where they are three even numbers that make a head, else `usual`."""
    if (
        isinstance(stated, list)
        and len(stated) == 3
        and all(isinstance(n, int) and n > 0 and n % 2 == 0 for n in stated)
    ):
        return (stated[0], stated[1], stated[2]) if sum(stated) == head_dim else usual(head_dim)
    return usual(head_dim)


class RopeTables:
    """Cosines and sines of text and image tokens, one entry a shape for as long as the model lives.

    Captured steps read them at their addresses. `angles` takes the number of text tokens, and the images' grids.
    """

    def __init__(self, angles: Callable[[int, Grids], Angles]) -> None:
        self._angles = angles
        self._tables: dict[tuple[int, Grids, DType, str], tuple[Tensor, Tensor]] = {}

    def of(self, text: int, grids: Grids, like: object) -> tuple[Tensor, Tensor]:
        """Cosine and sine, (S, 1, E) each, on the device of the tensor `like`, in its dtype but at least fp32."""
        assert isinstance(like, Tensor)
        key = text, grids, like.dtype, like.device
        if key not in self._tables:
            angles, dtype = self._angles(text, grids)[:, None], compute_dtype(like.dtype)
            self._tables[key] = tensor(np.cos(angles), dtype, like.device), tensor(np.sin(angles), dtype, like.device)
        return self._tables[key]
