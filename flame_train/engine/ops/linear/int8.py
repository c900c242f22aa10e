"""Rows of whole numbers of 8 bits, -127 to 127, with a factor for each row (LLM.int8(), arXiv 2208.07339, section 2.1).

A row's factor is its largest magnitude by 127, in fp32. Numbers are multiplied by 127 by the largest magnitude, and
rounded to nearest, ties to even. Factors are stored as those of `e4m3.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...dtype import Array, DType, float32, int8, uint32
from ...namespace import Namespace

_MOST: Final = 127
_LEAST: Final = 2.0**-100  # the least largest magnitude: that of a row of zeros, too


def decoded(xp: Namespace, data: Array, dtype: DType) -> Array:
    """Returns the whole numbers, not yet multiplied by their rows' factors."""
    return data.astype(dtype)


def encoded(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Returns x (..., C) as int8, and factors (...), NaN where a row is not finite."""
    largest = xp.max(xp.abs(x), axis=-1) if x.shape[-1] else xp.zeros(x.shape[:-1], x.dtype)
    finite = xp.isfinite(largest)
    most = x.dtype.type(_MOST)
    largest = xp.maximum(xp.where(finite, largest, 1), x.dtype.type(_LEAST)).astype(x.dtype)
    data = xp.rint(xp.where(finite[..., None], x, 0) * (most / largest)[..., None])
    factors = xp.where(finite, largest / most, np.nan).astype(float32)
    return data.astype(int8), factors.view(uint32)


def product(xp: Namespace, rows: Array, columns: Array) -> Array:
    """rows (M, K) @ columns (K, N) of whole numbers, exact as in int32, in fp64: its sums are far below 2^53."""
    wide = np.dtype(np.float64)
    return xp.matmul(rows.astype(wide), columns.astype(wide))
