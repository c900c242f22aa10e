"""Shapes and strides as NumPy and CuPy make them: of copies, views and parts of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...dtype import DType

Shape = tuple[int, ...]


@lru_cache(maxsize=8192)
def c_order(shape: Shape, itemsize: int) -> Shape:
    """Returns the strides of row-major memory."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))


@lru_cache(maxsize=8192)
def contiguous(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Tells whether elements lie one after another in row-major order, wherever a dim has more than one."""
    if 0 in shape:
        return True
    return all(n == 1 or s == t for n, s, t in zip(shape, strides, c_order(shape, itemsize), strict=True))


@lru_cache(maxsize=8192)
def kept_order(shape: Shape, strides: Shape, itemsize: int) -> Shape:
    """Returns the strides of dense memory in which the dims are nested as they are in `strides`."""
    order = sorted(range(len(shape)), key=lambda i: (-abs(strides[i]), i))
    nested = c_order(tuple(shape[i] for i in order), itemsize)
    found = dict(zip(order, nested, strict=True))
    return tuple(found[i] for i in range(len(shape)))


@lru_cache(maxsize=8192)
def reshaped(shape: Shape, strides: Shape, itemsize: int, wanted: Shape) -> tuple[Shape, Shape | None]:
    """Returns the new shape and a view's strides; None where only a copy can have it. ValueError for other counts."""
    size = math.prod(shape)
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        if wanted.count(-1) > 1 or not rest or size % rest:
            raise ValueError(f"cannot reshape array of size {size} into shape {wanted}")
        wanted = tuple(size // rest if n == -1 else n for n in wanted)
    if math.prod(wanted) != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {wanted}")
    if contiguous(shape, strides, itemsize):
        return wanted, c_order(wanted, itemsize)
    return wanted, _through(shape, strides, itemsize, wanted)


def _through(shape: Shape, strides: Shape, itemsize: int, wanted: Shape) -> Shape | None:
    """Strides for `wanted` where old dims that are merged lie evenly; by NumPy's `_attempt_nocopy_reshape`."""
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    made: list[int] = []
    i = j = 0
    while i < len(old) and j < len(wanted):
        last_i, last_j = i + 1, j + 1
        a, b = old[i][0], wanted[j]
        while a != b:
            if a < b:
                a *= old[last_i][0]
                last_i += 1
            else:
                b *= wanted[last_j]
                last_j += 1
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(i, last_i - 1)):
            return None
        steps, step = [], old[last_i - 1][1]
        for n in reversed(wanted[j:last_j]):
            steps.append(step)
            step *= n
        made += reversed(steps)
        i, j = last_i, last_j
    last = made[-1] if made else itemsize
    return (*made, *[last] * (len(wanted) - len(made)))  # what is left are ones


def indexed(shape: Shape, strides: Shape, key: tuple[Any, ...]) -> tuple[Shape, Shape, int] | None:
    """Returns shape, strides and offset in bytes of the view that a key of numbers, slices, None and ... means.

    None for a key of arrays, which means a copy. Raises IndexError as NumPy does.
    """
    given = sum(k is not None and k is not Ellipsis for k in key)
    sizes: list[int] = []
    steps: list[int] = []
    offset = dim = 0
    for k in key:
        if k is None:
            sizes.append(1)
            steps.append(0)
        elif k is Ellipsis:
            some = len(shape) - given
            sizes += shape[dim : dim + some]
            steps += strides[dim : dim + some]
            dim += some
        elif dim >= len(shape):
            raise IndexError(f"too many indices for array: array is {len(shape)}-dimensional")
        elif isinstance(k, slice):
            first, stop, by = k.indices(shape[dim])
            count = len(range(first, stop, by))
            offset += first * strides[dim] if count else 0
            sizes.append(count)
            steps.append(by * strides[dim])
            dim += 1
        elif isinstance(k, (int, np.integer)) and not isinstance(k, bool):
            n, at = shape[dim], int(k)
            if not -n <= at < n:
                raise IndexError(f"index {at} is out of bounds for axis {dim} with size {n}")
            offset += (at % n) * strides[dim]
            dim += 1
        else:
            return None
    return (*sizes, *shape[dim:]), (*steps, *strides[dim:]), offset


def gathered(shape: Shape, key: Any) -> Shape:
    """Returns the shape of what a key with arrays of whole numbers takes out of an array."""

    def stood_in(k: Any) -> Any:
        if isinstance(k, tuple):
            return tuple(stood_in(x) for x in k)
        if not hasattr(k, "xp"):
            return k
        if k.dtype.kind == "b":
            raise TypeError("how many elements a mask selects is not known in a shape run")
        return np.zeros(k.shape, k.dtype)

    found: Shape = np.broadcast_to(np.empty((), bool), shape)[stood_in(key)].shape
    return found


@lru_cache(maxsize=4096)
def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Returns the shape that all of a tuple of shapes broadcast to; raises ValueError where there is none."""
    found: Shape = np.broadcast_shapes(*shapes)
    return found


def ranked(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Returns the axes counted from 0; all for None. Raises AxisError as NumPy does."""
    if axis is None:
        return tuple(range(ndim))
    some = axis if isinstance(axis, (tuple, list)) else (axis,)
    found: tuple[int, ...] = np.lib.array_utils.normalize_axis_tuple(some, ndim)
    return found


_WEAK = (bool, int, float)
"""Python's numbers, which widen no array; of each kind one stands for all."""


@lru_cache(maxsize=4096)
def _dtypes(fn: Any, kinds: tuple[Any, ...]) -> tuple[DType, ...]:
    given = [k(1) if isinstance(k, type) else np.ones((1,), k) for k in kinds]
    with np.errstate(all="ignore"):
        made = fn(*given)
    return tuple(np.asarray(m).dtype for m in (made if isinstance(made, tuple) else (made,)))


def elementwise(fn: Any, operands: Sequence[Any]) -> tuple[DType, ...]:
    """Returns the dtypes of the results of a ufunc of NumPy's, or another function of elements."""
    return _dtypes(fn, tuple([_kind(x) for x in operands]))


def _kind(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else type(x) if type(x) in _WEAK else np.asarray(x).dtype


@lru_cache(maxsize=4096)
def _reduced_dtype(how: str, dtype: DType, wanted: DType | None) -> DType:
    fn = getattr(np, how)
    given = np.ones((1,), dtype)
    return np.asarray(fn(given) if wanted is None else fn(given, dtype=wanted)).dtype


def reduced(how: str, shape: Shape, dtype: DType, axis: Any, wanted: Any, keepdims: bool) -> tuple[Shape, DType]:
    """Returns shape and dtype of a reduction by NumPy's function of that name.

    Args:
        how: the function's name.
        shape, dtype: those of the input.
        axis: an axis, several, or None for all.
        wanted: the dtype that the caller asks for, or None.
        keepdims: whether reduced dims stay, with size 1.
    """
    axes = ranked(axis, len(shape))
    left = tuple([1 if i in axes else n for i, n in enumerate(shape)])
    if not keepdims:
        left = tuple([n for i, n in enumerate(shape) if i not in axes])
    return left, _reduced_dtype(how, dtype, None if wanted is None else np.dtype(wanted))
