"""Kernels that take elements by index along a dim, and that add elements at an index."""

from __future__ import annotations

import math

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, int32, int64
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape

_HEADER, _THREADS = "ops/indexing/index_elements.cuh", 256
_STEPS = 1 << 31  # of all elements' searches; beyond them the reference adds, in no fixed order


def no_elements_by_index(input: Array, dim: int, index: Array) -> str:
    """Why the kernels cannot take elements of `input` at `index` along `dim`; "" if they can."""
    if index.dtype not in (int32, int64) or input.ndim != index.ndim or not -input.ndim <= dim < input.ndim:
        return "arguments that are refused, or other indices than int32 and int64"
    d = dim % input.ndim
    if input.shape[:d] != index.shape[:d] or input.shape[d + 1 :] != index.shape[d + 1 :]:
        return "index has another shape in a dim other than"
    steps = index.size * min(input.shape[d], index.shape[d])
    if 0 in (input.size, index.size) or max(steps, input.size, index.size) > _STEPS - _THREADS:
        return "nothing to take, or too much"
    return same(AT_MOST_FP32, input)


def elements(k: Launcher, x: Array, dim: int, index: Array) -> Array:
    """x[..., index[..., i, ...], ...] along `dim`, in the shape of `index`."""
    d, y = dim % x.ndim, k.empty(index.shape, x.dtype)
    sizes = (y.size, x.shape[d], index.shape[d], math.prod(x.shape[d + 1 :]))
    args = (k.contiguous(x), k.xp.ascontiguousarray(index), y, *map(np.int32, sizes))
    names = {"T": x.dtype, "I": index.dtype, "SPAN": _THREADS}
    k.launch_header(_HEADER, "elements", names, (-(-y.size // _THREADS),), _THREADS, args)
    return y


def element_sums(k: Launcher, values: Array, dim: int, index: Array, shape: Shape, base: Array | None = None) -> Array:
    """An array of `shape`: `base` or zeros, with `values` added at `index` along `dim`, in the order of positions.

    For each line along `dim` either its elements search for the indices that name them, or its indices for equal ones,
    whichever are fewer.

    Args:
        values: in index's shape.
        dim: the dim that is indexed.
        index: int32 or int64.
        shape: the shape of the result.
        base: what sums are added to, or None.

    Returns:
        An array of `shape`.
    """
    d, values = dim % len(shape), k.contiguous(values)
    rows, count, inner = shape[d], index.shape[d], math.prod(shape[d + 1 :])
    out = k.empty(shape, values.dtype) if rows < count or base is not None else k.xp.zeros(shape, values.dtype)
    if rows < count:
        start = np.int64(0) if base is None else k.contiguous(base)
        kernel, span, first, blocks = "element_sums", _THREADS, out.size, -(-out.size // _THREADS)
    else:
        if base is not None:
            k.copy([out], [base])
        start = np.int64(0) if base is None else out
        span, first = _span(count, inner), index.size // count
        kernel, blocks = "leader_sums", -(-first // (_THREADS // span)) * -(-count // span)
    names = {"T": values.dtype, "I": index.dtype, "SPAN": span}
    args = (values, k.xp.ascontiguousarray(index), start, out, *map(np.int32, (first, rows, count, inner)))
    k.launch_header(_HEADER, kernel, names, (blocks,), _THREADS, args)
    return out


def _span(count: int, inner: int) -> int:
    """Indices of a line to a block: with an inner dim few, so that lines side by side are read as they lie."""
    most = _THREADS if inner == 1 else 16
    return min(most, max(4, 1 << (count - 1).bit_length()))
