"""Where the patches of an image lie: rotary angles by row and column, and places in a table of positions.

Patches come in square groups, which a vision tower merges. Shape letters: N patches, E width of a head.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

_THETA: Final = 1e4
"""The base of the tower's rotary frequencies."""

_Array = np.ndarray[Any, Any]


def places(rows: int, columns: int, merge: int) -> _Array:
    """Row and column of each patch, (N, 2): groups of `merge` * `merge` row by row, and so within each."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    grouped = grid.reshape(rows // merge, merge, columns // merge, merge, 2)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def patch_angles(rows: int, columns: int, head_dim: int, merge: int) -> _Array:
    """Each number's rotary angle at each patch (arXiv 2104.09864), fp64 (N, E): pairs lie half a head apart.

    A quarter of the head turns by the row and a quarter by the column.
    """
    frequencies = _THETA ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    turns = places(rows, columns, merge)[:, :, None] * frequencies
    return np.tile(turns.reshape(len(turns), -1), 2)


def interpolation(rows: int, columns: int, side: int, merge: int) -> tuple[_Array, _Array]:
    """The four entries of a table of `side` * `side` positions around each patch, and their shares, both (N, 4).

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
