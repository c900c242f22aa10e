"""Rows of 8-bit numbers in e4m3 (arXiv 2209.05433), with a power of two as a factor for each row.

A row's factor is the smallest power of two by which its numbers, divided, are at most 448, e4m3's largest. Powers of
two scale exactly, so weights read from an fp8 file are kept bit for bit, and all devices round alike. Data are uint8,
because CuPy has no 8-bit float. Factors are stored as uint32, the bits of a float32, so that they have no say in the
dtype of a result.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from ...dtype import Array, DType, float32, uint8, uint32
from ...namespace import Namespace

_MOST: Final = 126  # 448 in e4m3; 127 is NaN
_LIMIT: Final = 100  # factors lie between 2^-100 and 2^100

_VALUES: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def multiplied(capability: int) -> bool:
    """Tells whether cards of this compute capability multiply rows with factors: 9.0 (H100), and 12 (RTX 50)."""
    return capability == 90 or capability // 10 == 12


def decoded(xp: Namespace, data: Array, dtype: DType) -> Array:
    """Returns the numbers that e4m3 data hold, not yet multiplied by their rows' factors."""
    return xp.asarray(_VALUES.astype(dtype))[data]


def factors(scales: Array, dtype: DType) -> Array:
    """Factors, stored as uint32, as numbers of `dtype`."""
    return scales.view(float32).astype(dtype)


def encoded(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Returns x (..., C) as e4m3, rounded to nearest even, and factors (...), NaN where a row is not finite."""
    exponents, finite = _exponents(xp, x)
    y = xp.where(finite[..., None], x, 0) * xp.ldexp(xp.ones_like(x[..., :1]), -exponents[..., None])
    binade = xp.maximum(xp.where(y == 0, -6, xp.frexp(xp.abs(y))[1] - 1), -6)
    steps = xp.rint(xp.ldexp(xp.abs(y), 3 - binade)).astype(np.int32)
    data = xp.minimum((binade + 6) * 8 + steps, _MOST) + 128 * xp.signbit(y)
    scales = xp.where(finite, xp.ldexp(xp.ones_like(exponents, float32), exponents), float32.type(np.nan))
    return data.astype(uint8), scales.astype(float32).view(uint32)


def _exponents(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Returns the exponent of each row's factor, and whether all of the row is finite."""
    largest = xp.max(xp.abs(x), axis=-1) if x.shape[-1] else xp.zeros(x.shape[:-1], x.dtype)
    finite = xp.isfinite(largest)
    mantissa, exponent = xp.frexp(xp.where(finite, largest, 1))
    found = xp.where(largest > 0, exponent - 9 + (mantissa > 0.875), 0)  # 448 is 0.875 * 2^9
    return xp.clip(found, -_LIMIT, _LIMIT).astype(np.int32), finite


def rounded(xp: Namespace, x: Array) -> Array:
    """Returns x rounded to e4m3 with a factor for each row, in its own dtype."""
    data, scales = encoded(xp, x)
    return decoded(xp, data, x.dtype) * factors(scales, x.dtype)[..., None]
