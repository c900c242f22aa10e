"""What NumPy's functions make of arrays of given shapes and dtypes: found by asking NumPy with as few elements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...dtype import DType
from .layouts import Shape, ranked

_WEAK = (bool, int, float)
"""Python's numbers, which widen no array; of each kind one stands for all."""


@lru_cache(maxsize=4096)
def _dtypes(fn: Any, kinds: tuple[Any, ...]) -> tuple[DType, ...]:
    given = [k(1) if isinstance(k, type) else np.ones((1,), k) for k in kinds]
    with np.errstate(all="ignore"):
        made = fn(*given)
    return tuple(np.asarray(m).dtype for m in (made if isinstance(made, tuple) else (made,)))


def elementwise(fn: Any, operands: Sequence[Any]) -> tuple[DType, ...]:
    """The dtypes of the results of a ufunc of NumPy's, or another function of elements."""
    return _dtypes(fn, tuple([_kind(x) for x in operands]))


def _kind(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else type(x) if type(x) in _WEAK else np.asarray(x).dtype


@lru_cache(maxsize=4096)
def _reduced_dtype(how: str, dtype: DType, wanted: DType | None) -> DType:
    fn = getattr(np, how)
    given = np.ones((1,), dtype)
    return np.asarray(fn(given) if wanted is None else fn(given, dtype=wanted)).dtype


def reduced(how: str, shape: Shape, dtype: DType, axis: Any, wanted: Any, keepdims: bool) -> tuple[Shape, DType]:
    """Shape and dtype of a reduction by NumPy's function of that name.

    Args:
        how: the function's name.
        shape, dtype: those of the input.
        axis: an axis, several, or None for all.
        wanted: the dtype that the caller asks for, or None.
        keepdims: whether reduced dims stay, with size 1.

    Returns:
        Shape and dtype.
    """
    axes = ranked(axis, len(shape))
    left = tuple([1 if i in axes else n for i, n in enumerate(shape)])
    if not keepdims:
        left = tuple([n for i, n in enumerate(shape) if i not in axes])
    return left, _reduced_dtype(how, dtype, None if wanted is None else np.dtype(wanted))
