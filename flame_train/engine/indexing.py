"""How brackets are read, as torch.Tensor reads them: for reading an array and for writing into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError

Places = tuple[Any, ...]


def steps(xp: Any, index: Any) -> tuple[Places, Places]:
    """`index` as two for NumPy: x[first] is a view, and x[first][rest] what is meant.

    Masks become the places where they hold. Whole numbers are taken before arrays of them: NumPy counts both as
    arrays, and where something stands between puts their dim first. What is an array already lies on `xp`'s device.
    """
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        parts += _read(xp, part)
    if not any(hasattr(p, "dtype") for p in parts):
        return tuple(parts), ()
    if not any(isinstance(p, int) for p in parts):
        return (), tuple(parts)
    first = [p if isinstance(p, int) or p is ... else slice(None) for p in parts if p is not None]
    return tuple(first), tuple([p for p in parts if not isinstance(p, int)])


def _read(xp: Any, part: Any) -> list[Any]:
    """One entry of an index: a whole number, slice, None or ..., or arrays of whole numbers."""
    if isinstance(part, (bool, np.bool_)):
        raise ShapeError("getitem: a single True or False is no index here; use unsqueeze or a mask")
    if part is None or isinstance(part, (int, slice, type(...))):
        return [part]
    array = part if hasattr(part, "dtype") else np.asarray(part, None if np.size(part) else np.int64)
    if array.dtype == bool:
        return list(xp.nonzero(xp.asarray(array)))
    if array.dtype.kind not in "iu":
        raise ShapeError(f"getitem: expected whole numbers or truth values as index, got {array.dtype.name}")
    return [int(array)] if array.ndim == 0 and isinstance(array, (np.ndarray, np.integer)) else [xp.asarray(array)]
