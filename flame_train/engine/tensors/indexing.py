"""What `x[index]` means, as torch.Tensor reads it: for reading an array and for writing into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..namespace import Namespace

Places = tuple[Any, ...]
"""An index for NumPy or CuPy."""
_SINGLE = "getitem: a single True or False is no index here; use unsqueeze or a mask"


def steps(xp: Namespace, index: Any, shape: Sequence[int]) -> tuple[Places, Places]:
    """Splits `index` of an array of `shape` into two: x[first] is a view, and x[first][rest] is PyTorch's x[index].

    Single integers go into `first` if there are arrays as well. NumPy would treat both as arrays, and put their dim
    first where a slice stands between them. Masks become the positions where they are True. Arrays in `index` must be
    on `xp`'s device.

    Raises ShapeError for something that is no index and for a mask of another shape, IndexError for positions in a dim
    of size 0.
    """
    entries = [_entry(part) for part in (index if isinstance(index, tuple) else (index,))]
    arrays = any(hasattr(e, "dtype") for e in entries)
    parts: list[Any] = []
    for entry, dims in zip(entries, _dims(entries, tuple(shape)), strict=True):
        if not (arrays and entry is ... and not dims):  # for NumPy an empty ... would separate the arrays around it
            parts += _read(xp, entry, dims)
    if not any(hasattr(p, "dtype") for p in parts):
        return tuple(parts), ()
    if not any(isinstance(p, int) for p in parts):
        return (), tuple(parts)
    first = [p if isinstance(p, int) or p is ... else slice(None) for p in parts if p is not None]
    return tuple(first), tuple([p for p in parts if not isinstance(p, int)])


def _entry(part: Any) -> Any:
    """Returns one entry of an index: an int, slice, None, ... or an array of integers or booleans."""
    if isinstance(part, (bool, np.bool_)):
        raise ShapeError(_SINGLE)
    if part is None or isinstance(part, (int, slice, type(...))):
        return part
    array = part
    if not isinstance(getattr(part, "dtype", None), np.dtype):  # a list, or another library's tensor
        array = np.asarray(part, None if np.size(part) else np.int64)
    if array.dtype == np.uint8 and array.ndim:
        raise ShapeError("getitem: uint8 is a mask for PyTorch and whole numbers for NumPy; make it bool or int64")
    if array.dtype == bool and not array.ndim:
        raise ShapeError(_SINGLE)
    if array.dtype != bool and array.dtype.kind not in "iu":
        raise ShapeError(f"getitem: expected whole numbers or truth values as index, got {array.dtype.name}")
    return int(array) if array.ndim == 0 and isinstance(array, (np.ndarray, np.integer)) else array


def _is_mask(entry: Any) -> bool:
    return getattr(entry, "dtype", None) == np.dtype(bool)


def _dims(entries: Sequence[Any], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the sizes of the dims that each entry indexes: several for a mask or `...`, none for None."""
    taken = [e.ndim if _is_mask(e) else 0 if e is None or e is ... else 1 for e in entries]
    found, at = [], 0
    for entry, count in zip(entries, taken, strict=True):
        step = len(shape) - sum(taken) if entry is ... else count
        found.append(shape[at : at + step])
        at += step
    return found


def _read(xp: Namespace, entry: Any, dims: tuple[int, ...]) -> list[Any]:
    """Returns the entry over `dims` for NumPy and CuPy; refuses positions in an empty dim, which CuPy wraps around."""
    if not hasattr(entry, "dtype"):
        return [entry]
    if _is_mask(entry):
        if entry.shape != dims:
            raise ShapeError(f"getitem: expected a mask of shape {dims}, that of the dims it masks, got {entry.shape}")
        return list(xp.nonzero(xp.asarray(entry)))
    if dims == (0,) and entry.size:
        raise IndexError("getitem: a dim of size 0 has no place to take")
    return [xp.asarray(entry)]
