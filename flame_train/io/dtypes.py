"""The safetensors dtype tags and the NumPy types that hold them.

`_TABLE` has the order of the format's reference writer. Tensors are laid out from its last entry to the first, so it
determines the bytes of every written file.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

_TABLE: Final[tuple[tuple[str, Any], ...]] = (
    ("BOOL", np.bool_),
    ("U8", np.uint8),
    ("I8", np.int8),
    ("F8_E5M2", ml_dtypes.float8_e5m2),
    ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
    ("I16", np.int16),
    ("U16", np.uint16),
    ("F16", np.float16),
    ("BF16", ml_dtypes.bfloat16),
    ("I32", np.int32),
    ("U32", np.uint32),
    ("F32", np.float32),
    ("C64", np.complex64),
    ("F64", np.float64),
    ("I64", np.int64),
    ("U64", np.uint64),
)

DTYPE_OF_TAG: Final = MappingProxyType({tag: np.dtype(kind) for tag, kind in _TABLE})
TAG_OF_DTYPE: Final = MappingProxyType({np.dtype(kind): tag for tag, kind in _TABLE})
RANK_OF_TAG: Final = MappingProxyType({tag: rank for rank, (tag, _) in enumerate(_TABLE)})
FLOAT_TAGS: Final = frozenset(tag for tag, _ in _TABLE if tag.startswith(("F", "BF")))


def tag_of(dtype: Any) -> str:
    """Returns the tag under which an array of `dtype` is stored. TypeError for one that the format cannot hold."""
    little = np.dtype(dtype).newbyteorder("<")
    tag = TAG_OF_DTYPE.get(little)
    if tag is None:
        raise TypeError(f"safetensors has no type for NumPy dtype {dtype!r}; known: {', '.join(DTYPE_OF_TAG)}")
    return tag


_EIGHT_BITS: Final = frozenset(DTYPE_OF_TAG[tag] for tag in FLOAT_TAGS if tag.startswith("F8"))
_PAIRS_AT_ONCE: Final = 1 << 16  # so few that their places stay in a core's cache


def widened(x: Array, dtype: Any) -> Array:
    """Returns the numbers of `x` in `dtype`, as `astype` does.

    Those of 8-bit floats are looked up by twos: ml_dtypes converts one after another, a tenth as fast.
    """
    target = np.dtype(dtype)
    if x.dtype not in _EIGHT_BITS or target.itemsize not in (2, 4) or x.size < _PAIRS_AT_ONCE:
        return x.astype(target)
    flat, made = x.reshape(-1), np.empty(x.shape, target)
    even = x.size // 2 * 2
    places, table = flat[:even].view(np.uint16), _pairs(x.dtype, target)
    filled = made.reshape(-1)[:even].view(table.dtype)
    for begin in range(0, len(places), _PAIRS_AT_ONCE):
        part = slice(begin, begin + _PAIRS_AT_ONCE)
        np.take(table, places[part], mode="clip", out=filled[part])  # no place is beyond; other modes copy first
    made.reshape(-1)[even:] = flat[even:].astype(target)
    return made


@cache
def _pairs(stored: Any, target: Any) -> Array:
    """Returns for every two bytes their numbers beside each other, as one whole number."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(stored).astype(target)
    return numbers.view(f"u{2 * target.itemsize}")
