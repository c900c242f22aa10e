"""The matrix of ConvRot (arXiv 2512.03673), by which groups of a weight's columns are multiplied before rounding.

It is the regular Hadamard matrix, a Kronecker power of one of 4 rows: orthonormal, symmetric, and so its own inverse.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np

from flame_train.io.dtypes import Array

_OF_4: Final = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32) / 2
_LARGEST: Final = 256


def is_group(size: int, columns: int) -> bool:
    """Tells whether a matrix of this size is such a power, and whole groups of it make so many columns."""
    return size > 1 and size & (size - 1) == 0 and size.bit_length() % 2 == 1 and columns % size == 0


def group_of(columns: int) -> int:
    """Returns how many of so many columns are rotated together: 256, 64 or 16; 0, none, where none of them divides.

    Peers take 256, or the largest power of 4 below it (ai-toolkit, which leaves out what falls below 16).
    """
    return next((size for size in (_LARGEST, 64, 16) if columns % size == 0), 0)


@cache
def hadamard(size: int) -> Array:
    """Returns the matrix of `size` rows, a power of 4, in fp32, whose entries it holds exactly."""
    return np.ones((1, 1), np.float32) if size == 1 else np.kron(_OF_4, hadamard(size // 4))
