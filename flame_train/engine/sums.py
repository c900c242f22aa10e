"""Sums that are exact enough in NumPy and fast enough in CuPy, and the sum that undoes broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..errors import ShapeError
from .dtype import Array, DType, as_array, compute_dtype, float32, float64
from .namespace import Namespace

_MANY = 1024  # from so many fp32 numbers on, NumPy's one-by-one summation is too inexact


def unbroadcast(xp: Namespace, g: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """Returns `g` summed to the dtype and `shape` that was broadcast. ShapeError if that does not broadcast to `g`."""
    if g.shape != shape:
        work = compute_dtype(g.dtype)
        if g.ndim > len(shape):
            g = leading_sum(g, g.ndim - len(shape), work)
        axes = tuple(i for i, (n, m) in enumerate(zip(g.shape, shape, strict=True)) if n != m)
        if axes:
            g = accurate_sum(xp.sum, g, axes, True, work)
        if g.shape != shape:
            raise ShapeError(f"a gradient of shape {g.shape} cannot be summed down to its input's {shape}")
    return xp.asarray(g, dtype) if g.dtype != dtype else as_array(g)


def leading_sum(x: Array, axes: int, dtype: DType) -> Array:
    """Returns the sum over the first `axes` dims, in `dtype`.

    On a GPU many rows of few columns are summed in parts, and the parts then summed. CuPy gives each column's whole sum
    to one processor, which leaves the others idle.
    """
    if isinstance(x, np.ndarray):
        return accurate_sum(np.sum, x, tuple(range(axes)), dtype=dtype)
    rows, columns = math.prod(x.shape[:axes]), math.prod(x.shape[axes:])
    parts = math.gcd(rows, 512)
    if rows < 4096 or columns > 4096 or parts == 1:
        return x.sum(axis=tuple(range(axes)), dtype=dtype)
    return x.reshape(parts, rows // parts, *x.shape[axes:]).sum(axis=1, dtype=dtype).sum(axis=0)


def accurate_sum(
    fn: Callable[..., Array], x: Array, axes: tuple[int, ...], keepdims: bool = False, dtype: DType | None = None
) -> Array:
    """Returns `fn`, the namespace's sum or mean, of `x` over `axes`, in `dtype`.

    NumPy adds numbers pairwise only along the axis of the smallest stride. Along others it adds one by one, with an
    error that grows with their count. So long fp32 sums of that kind are taken in fp64 and rounded once.

    Args:
        fn: the namespace's sum or mean.
        x: the input.
        axes: the dims over which is summed.
        keepdims: whether these stay, with size 1.
        dtype: the result's dtype; None: that of `x`.
    """
    result = dtype or x.dtype
    if not isinstance(x, np.ndarray) or result != float32 or math.prod([x.shape[a] for a in axes]) < _MANY:
        return fn(x, axis=axes, keepdims=keepdims, dtype=dtype)
    nearest = min((a for a in range(x.ndim) if x.shape[a] > 1), key=lambda a: abs(x.strides[a]))
    return as_array(fn(x, axis=axes, keepdims=keepdims, dtype=dtype if nearest in axes else float64)).astype(result)
