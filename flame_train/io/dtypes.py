"""The safetensors dtype tags and the NumPy types that hold them.

`_TABLE` has the order of the format's reference writer. Tensors are laid out from its last entry to the first, so it
determines the bytes of every written file.
"""

from __future__ import annotations

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
