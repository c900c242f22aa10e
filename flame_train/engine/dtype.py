"""The dtypes the engine knows: one table, NumPy dtypes throughout.

bfloat16 and the two fp8 formats come from `ml_dtypes` and are ordinary NumPy dtypes. CuPy takes the same
objects, so the rest of the engine never asks which library an array belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = Any
"""A NumPy or CuPy array. In an op's signature it marks a tensor input; see `op.py`."""

DType: TypeAlias = "np.dtype[Any]"

HostBytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

float64 = np.dtype(np.float64)
float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
int64 = np.dtype(np.int64)
int32 = np.dtype(np.int32)
int8 = np.dtype(np.int8)
uint32 = np.dtype(np.uint32)
uint8 = np.dtype(np.uint8)
bool_ = np.dtype(np.bool_)

FLOATS = frozenset((float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2))
"""Every floating dtype."""

_RAISED = {d: float32 for d in FLOATS if d.itemsize < 4}
_NAMED = {d.name: d for d in (*FLOATS, int64, int32, uint32, int8, uint8, bool_)}
_NAMED |= {"fp64": float64, "fp32": float32, "fp16": float16, "bf16": bfloat16}


def as_dtype(dtype: str | DType | type) -> DType:
    """Returns a dtype by its PyTorch name ("float32", "bfloat16", ...), short name ("bf16") or NumPy object.

    Raises `TypeError` for a name that is not known.
    """
    if isinstance(dtype, str):
        if dtype not in _NAMED:
            raise TypeError(f"dtype: expected one of {', '.join(sorted(_NAMED))}, got {dtype!r}")
        return _NAMED[dtype]
    return np.dtype(dtype)


def is_float(dtype: DType) -> bool:
    """Returns True for every floating dtype, the 8- and 16-bit ones included (NumPy calls those kind 'V')."""
    return dtype in FLOATS


def compute_dtype(dtype: DType) -> DType:
    """Returns what arithmetic on `dtype` is done in: fp32 for anything narrower, else `dtype` itself."""
    return _RAISED.get(dtype, dtype)


def as_array(value: Array) -> Array:
    """Returns `value` as an array: NumPy's arithmetic turns 0-d arrays into scalars, which cannot be written to."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def promote(dtypes: Iterable[DType]) -> DType | None:
    """Returns the wider of the floating ones among `dtypes`, fp32 where two are equally wide; None if there is none."""
    floats = [d for d in dtypes if d in FLOATS]
    if not floats:
        return None
    result = floats[0]
    for d in floats[1:]:
        if d != result:
            result = float32 if d.itemsize == result.itemsize else max(d, result, key=lambda t: t.itemsize)
    return result


def promote_floats(dtypes: Iterable[DType]) -> DType:
    """Does `promote` where one of `dtypes` is floating at least."""
    result = promote(dtypes)
    assert result is not None
    return result


def result_type(arrays: Iterable[Array]) -> DType | None:
    """Returns the floating dtype `arrays` promote to, or None; 0-d ones widen no other. As torch.result_type."""
    floats = [a for a in arrays if a.dtype in FLOATS]
    return promote([a.dtype for a in floats if a.ndim] or [a.dtype for a in floats])


def narrowed(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The 0-d integer arrays among `arrays`, cast to the dtype of the other integer arrays; none if all are 0-d.

    NumPy would let a 0-d array widen the result; PyTorch does not.
    """
    integers = {n: a for n, a in arrays.items() if a.dtype.kind in "iu"}
    others = [a.dtype for a in integers.values() if a.ndim]
    return {n: a.astype(np.result_type(*others)) for n, a in integers.items() if not a.ndim} if others else {}
