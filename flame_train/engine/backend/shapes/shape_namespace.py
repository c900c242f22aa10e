"""The module `cupy` as far as the CUDA backend and the ops' references use it, over arrays without memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..cupy_calls import CupyCalls
from .array import ShapeArray
from .driver import Cuda, Gpu
from .layouts import Shape, broadcast, c_order, contiguous, elementwise, kept_order, ranked, reduced


class _Ufunc:
    """A function of elements of NumPy's."""

    def __init__(self, xp: ShapeNamespace, fn: np.ufunc) -> None:
        self._xp, self._fn = xp, fn

    def __call__(self, *operands: Any, out: Any = None) -> Any:
        return self._xp.elementwise(self._fn, *operands) if out is None else out

    def at(self, target: ShapeArray, indices: Any, values: Any) -> None:
        """Adds nothing."""


def _reduction(name: str) -> Any:
    """Returns NumPy's reduction of that name, as a method."""

    def reduce(
        self: ShapeNamespace,
        x: ShapeArray,
        axis: Any = None,
        dtype: Any = None,
        out: None = None,
        keepdims: bool = False,
    ) -> ShapeArray:
        """Returns an array of the shape that the reduction has."""
        return self.empty(*reduced(name, x.shape, x.dtype, axis, dtype, keepdims))

    return reduce


class ShapeNamespace:
    """Functions as NumPy's, over `ShapeArray`s. What is not defined here and no ufunc is not known in a shape run."""

    ndarray, newaxis, pi, inf = ShapeArray, None, math.pi, math.inf

    def __init__(self, gpu: Gpu) -> None:
        self.cuda, self.calls = Cuda(gpu), CupyCalls()
        self.backend: Any = None  # that of the run, which has this namespace
        self.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=self._as_strided))

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name, None)
        made: Any
        if isinstance(found, np.ufunc):
            made = _Ufunc(self, found)
        elif isinstance(found, type) or name in ("broadcast_shapes", "result_type"):
            made = found
        else:
            raise AttributeError(f"a shape run has no function {name!r}")
        setattr(self, name, made)
        return made

    def ElementwiseKernel(self, *_: Any) -> Any:  # noqa: N802
        return lambda x: self.empty(x.shape, x.dtype)

    # ---- making arrays -------------------------------------------------------------------------------

    def laid_out(self, shape: Shape, dtype: np.dtype[Any], strides: Shape) -> ShapeArray:
        """Returns new dense memory with these strides."""
        return ShapeArray(self, shape, dtype, strides, self.cuda.alloc(math.prod(shape) * dtype.itemsize))

    def empty(self, shape: int | Sequence[int], dtype: Any = float, order: str = "C") -> ShapeArray:
        sizes = tuple(map(int, shape)) if isinstance(shape, (tuple, list)) else (int(shape),)  # type: ignore[arg-type]
        kind = dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)
        return self.laid_out(sizes, kind, c_order(sizes, kind.itemsize))

    zeros = empty

    def ones(self, shape: int | Sequence[int], dtype: Any = float) -> ShapeArray:
        return self.full(shape, 1, dtype)

    def full(self, shape: Any, value: Any, dtype: Any = None) -> ShapeArray:
        made = self.empty(shape, np.asarray(value).dtype if dtype is None else dtype)
        self.calls.note("full", (value,), made.dtype)
        return made

    def empty_like(self, x: ShapeArray, dtype: Any = None) -> ShapeArray:
        kind = x.dtype if dtype is None else np.dtype(dtype)
        return self.laid_out(x.shape, kind, x.shape_strides("K", kind.itemsize))

    zeros_like = ones_like = empty_like

    def arange(self, *args: Any, dtype: Any = None) -> ShapeArray:
        made = range(*args) if all(isinstance(a, (int, np.integer)) for a in args) else np.arange(*args)
        found = self.empty((len(made),), np.arange(1).dtype if dtype is None else dtype)
        self.calls.note("arange", (), found.dtype)
        return found

    def eye(self, rows: int, columns: int | None = None, dtype: Any = float) -> ShapeArray:
        return self.empty((rows, rows if columns is None else columns), dtype)

    def array(self, x: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ShapeArray:
        if not isinstance(x, ShapeArray):
            x = self.empty(np.shape(x), np.asarray(x).dtype)
        return x.astype(x.dtype if dtype is None else dtype, order, copy)

    def asarray(self, x: Any, dtype: Any = None) -> ShapeArray:
        return self.array(x, dtype, copy=False)

    def ascontiguousarray(self, x: ShapeArray, dtype: Any = None) -> ShapeArray:
        kind = x.dtype if dtype is None else np.dtype(dtype)
        return x if x.flags.c_contiguous and kind == x.dtype else x.astype(kind, order="C")

    # ---- views ---------------------------------------------------------------------------------------

    def _as_strided(self, x: ShapeArray, shape: Shape, strides: Shape) -> ShapeArray:
        return x._view(tuple(shape), tuple(strides))

    def broadcast_to(self, x: ShapeArray, shape: Any) -> ShapeArray:
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if broadcast((x.shape, sizes)) != sizes:
            raise ValueError(f"operands could not be broadcast together with shapes {x.shape} {sizes}")
        new = len(sizes) - x.ndim
        strides = [0 if n == 1 and m != 1 else s for n, m, s in zip(x.shape, sizes[new:], x.strides, strict=True)]
        return x._view(sizes, (*[0] * new, *strides))

    def broadcast_arrays(self, *arrays: ShapeArray) -> list[ShapeArray]:
        shape = broadcast(tuple(a.shape for a in arrays))
        return [self.broadcast_to(a, shape) for a in arrays]

    def transpose(self, x: ShapeArray, axes: Any = None) -> ShapeArray:
        return x.transpose(*(axes or ()))

    def swapaxes(self, x: ShapeArray, a: int, b: int) -> ShapeArray:
        return x.swapaxes(a, b)

    def moveaxis(self, x: ShapeArray, source: Any, destination: Any) -> ShapeArray:
        old, new = ranked(source, x.ndim), ranked(destination, x.ndim)
        order = [i for i in range(x.ndim) if i not in old]
        for to, where in sorted(zip(new, old, strict=True)):
            order.insert(to, where)
        return x.transpose(order)

    def expand_dims(self, x: ShapeArray, axis: Any) -> ShapeArray:
        some = axis if isinstance(axis, (tuple, list)) else (axis,)
        new = ranked(some, x.ndim + len(some))
        rest = iter([slice(None)] * x.ndim)
        return x[tuple([None if i in new else next(rest) for i in range(x.ndim + len(new))])]

    def squeeze(self, x: ShapeArray, axis: Any = None) -> ShapeArray:
        return x.squeeze(axis)

    def reshape(self, x: ShapeArray, shape: Any) -> ShapeArray:
        return x.reshape(shape)

    def atleast_1d(self, x: ShapeArray) -> ShapeArray:
        return x if x.shape else x.reshape(1)

    def flip(self, x: ShapeArray, axis: Any = None) -> ShapeArray:
        axes = ranked(axis, x.ndim)
        return x[tuple([slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim)])]

    def split(self, x: ShapeArray, cuts: Any, axis: int = 0) -> list[ShapeArray]:
        places = cuts if isinstance(cuts, (tuple, list)) else [x.shape[axis] // cuts * i for i in range(1, cuts)]
        ends = [0, *places, x.shape[axis]]
        front = [slice(None)] * ranked(axis, x.ndim)[0]
        return [x[(*front, slice(a, b))] for a, b in pairwise(ends)]

    def may_share_memory(self, a: ShapeArray, b: ShapeArray) -> bool:
        if a.data.mem is not b.data.mem or not a.size or not b.size:
            return False
        (first, last), (begin, end) = ((x.data.ptr + _low(x), x.data.ptr + _high(x)) for x in (a, b))
        return first < end and begin < last

    # ---- arithmetic ----------------------------------------------------------------------------------

    def elementwise(self, fn: Any, *operands: Any) -> Any:
        """Returns what a function of elements makes of operands that broadcast."""
        self.calls.note(fn.__name__, operands)
        arrays = [x for x in operands if isinstance(x, ShapeArray)]
        dtypes = elementwise(fn, operands)
        shape = broadcast(tuple([a.shape for a in arrays]))
        whole = [a for a in arrays if a.shape == shape]
        made = []
        for dtype in dtypes:
            strides = c_order(shape, dtype.itemsize)
            if whole and not any(contiguous(a.shape, a.strides, a.itemsize) for a in whole):
                strides = kept_order(shape, whole[0].strides, dtype.itemsize)
            made.append(self.laid_out(shape, dtype, strides))
        return made[0] if len(made) == 1 else tuple(made)

    def where(self, condition: Any, a: Any, b: Any) -> ShapeArray:
        made: ShapeArray = self.elementwise(np.where, condition, a, b)
        return made

    def clip(self, x: ShapeArray, low: Any = None, high: Any = None) -> ShapeArray:
        made: ShapeArray = self.elementwise(np.minimum, x, high if low is None else low)
        return made

    def matmul(self, a: ShapeArray, b: ShapeArray) -> ShapeArray:
        left, right = a if a.ndim > 1 else a[None], b if b.ndim > 1 else b[:, None]
        if left.shape[-1] != right.shape[-2]:
            raise ValueError(f"matmul: {a.shape} and {b.shape} do not fit")
        shape = [*broadcast((left.shape[:-2], right.shape[:-2]))]
        shape += [left.shape[-2]] * (a.ndim > 1) + [right.shape[-1]] * (b.ndim > 1)
        return self.empty(shape, np.result_type(a.dtype, b.dtype))

    def einsum(self, text: str, *operands: ShapeArray, optimize: bool = False) -> ShapeArray:
        inputs, out = text.replace(" ", "").split("->")
        sizes: dict[str, int] = {}
        for names, x in zip(inputs.split(","), operands, strict=True):
            sizes |= {c: n for c, n in zip(names, x.shape, strict=True) if sizes.get(c, 1) == 1}
        return self.empty([sizes[c] for c in out], np.result_type(*(x.dtype for x in operands)))

    sum, mean, prod, any, all = map(_reduction, ("sum", "mean", "prod", "any", "all"))
    max, min, argmax, argmin = map(_reduction, ("max", "min", "argmax", "argmin"))

    def cumsum(self, x: ShapeArray, axis: Any = None, dtype: Any = None) -> ShapeArray:
        kind = reduced("cumsum", x.shape, x.dtype, None, dtype, False)[1]
        return self.empty(x.shape if axis is not None else (x.size,), kind)

    cumprod = cumsum

    # ---- joining and choosing ------------------------------------------------------------------------

    def concatenate(self, arrays: Sequence[ShapeArray], axis: int = 0) -> ShapeArray:
        self.calls.note("concatenate", arrays)
        shape = [*arrays[0].shape]
        shape[axis] = sum(a.shape[axis] for a in arrays)
        return self.empty(shape, np.result_type(*(a.dtype for a in arrays)))

    def stack(self, arrays: Sequence[ShapeArray], axis: int = 0) -> ShapeArray:
        return self.concatenate([self.expand_dims(a, axis) for a in arrays], axis)

    def pad(self, x: ShapeArray, widths: Any, mode: str = "constant", **_: Any) -> ShapeArray:
        pairs = np.broadcast_to(np.asarray(widths), (x.ndim, 2)).tolist()
        return self.empty([n + a + b for n, (a, b) in zip(x.shape, pairs, strict=True)], x.dtype)

    def roll(self, x: ShapeArray, shift: Any, axis: Any = None) -> ShapeArray:
        return x.copy()

    def tile(self, x: ShapeArray, times: Any) -> ShapeArray:
        by = times if isinstance(times, (tuple, list)) else (times,)
        return self.empty(np.tile(np.broadcast_to(np.empty((), bool), x.shape), by).shape, x.dtype)

    def repeat(self, x: ShapeArray, repeats: int, axis: int | None = None) -> ShapeArray:
        flat = x.ravel() if axis is None else x
        shape = [*flat.shape]
        shape[axis or 0] *= repeats
        return self.empty(shape, x.dtype)

    def take(self, x: ShapeArray, indices: Any, axis: int | None = None) -> ShapeArray:
        flat = x.ravel() if axis is None else x
        at = ranked(axis or 0, flat.ndim)[0]
        chosen = indices.shape if isinstance(indices, ShapeArray) else np.shape(indices)
        return self.empty((*flat.shape[:at], *chosen, *flat.shape[at + 1 :]), x.dtype)

    def take_along_axis(self, x: ShapeArray, indices: ShapeArray, axis: int) -> ShapeArray:
        at = ranked(axis, x.ndim)[0]
        around = (*x.shape[:at], indices.shape[at], *x.shape[at + 1 :])
        return self.empty(broadcast((around, indices.shape)), x.dtype)

    def nonzero(self, x: ShapeArray) -> Any:
        return x.nonzero()

    def argsort(self, x: ShapeArray, axis: int = -1, kind: str | None = None) -> ShapeArray:
        return self.empty(x.shape, np.int64)

    def searchsorted(self, x: ShapeArray, values: Any, side: str = "left") -> ShapeArray:
        return self.empty(values.shape, np.int64)


def _low(x: ShapeArray) -> int:
    return sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True) if s < 0)


def _high(x: ShapeArray) -> int:
    return sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True) if s > 0) + x.itemsize
