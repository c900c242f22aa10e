"""Arrays without memory: shape, dtype, strides and an address, with the part of CuPy's interface that steps use.

Every operation allocates what CuPy would and computes nothing. What is read back to the host is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...dtype import DType
from .layouts import Shape, c_order, contiguous, gathered, indexed, kept_order, ranked, reduced, reshaped
from .pool import Pointer


class Flags(NamedTuple):
    """How an array lies in memory."""

    c_contiguous: bool
    f_contiguous: bool


@lru_cache(maxsize=8192)
def _flags(shape: Shape, strides: Shape, itemsize: int) -> Flags:
    return Flags(contiguous(shape, strides, itemsize), contiguous(shape[::-1], strides[::-1], itemsize))


class ShapeArray:
    """What `cupy.ndarray` is on a GPU, without values. `xp` is the namespace that made it, and knows its backend.

    Args:
        xp: the namespace.
        shape: in elements.
        dtype: the elements' dtype.
        strides: in bytes.
        data: a pointer that counts memory and holds none.
        base: the array that this one is a view of, or None.
    """

    __slots__ = ("__weakref__", "base", "data", "dtype", "shape", "size", "strides", "xp")
    __array_ufunc__ = None  # so that a NumPy number on the left leaves the operation to the array

    def __init__(self, xp: Any, shape: Shape, dtype: DType, strides: Shape, data: Pointer, base: Any = None) -> None:
        self.xp, self.shape, self.dtype, self.strides, self.data, self.base = xp, shape, dtype, strides, data, base
        self.size = math.prod(shape)

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AttributeError("an array of a shape run has no memory")

    # ---- what it is ----------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def flags(self) -> Flags:
        return _flags(self.shape, self.strides, self.dtype.itemsize)

    @property
    def device(self) -> Any:
        return self.xp.cuda.Device()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"ShapeArray(shape={self.shape}, dtype={self.dtype.name})"

    # ---- views ---------------------------------------------------------------------------------------

    def _view(self, shape: Shape, strides: Shape, offset: int = 0, dtype: DType | None = None) -> ShapeArray:
        data = Pointer(self.data.mem, self.data.ptr + offset) if offset else self.data
        return ShapeArray(self.xp, shape, dtype or self.dtype, strides, data, self if self.base is None else self.base)

    @property
    def T(self) -> ShapeArray:  # noqa: N802  # NumPy's name
        return self._view(self.shape[::-1], self.strides[::-1])

    def transpose(self, *axes: Any) -> ShapeArray:
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        if not order:
            return self.T
        shape, strides = self.shape, self.strides
        return self._view(tuple([shape[i] for i in order]), tuple([strides[i] for i in order]))

    def swapaxes(self, a: int, b: int) -> ShapeArray:
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def reshape(self, *shape: Any) -> ShapeArray:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        sizes, strides = reshaped(self.shape, self.strides, self.dtype.itemsize, tuple(map(int, wanted)))
        if strides is None:
            return self.copy().reshape(sizes)
        return self._view(sizes, strides)

    def ravel(self) -> ShapeArray:
        return self.reshape(-1)

    def squeeze(self, axis: Any = None) -> ShapeArray:
        gone = [i for i, n in enumerate(self.shape) if n == 1] if axis is None else ranked(axis, self.ndim)
        left = [i for i in range(self.ndim) if i not in gone]
        return self.transpose(left) if left else self._view((), ())

    def view(self, dtype: Any) -> ShapeArray:
        new = np.dtype(dtype)
        if new.itemsize == self.dtype.itemsize or not self.shape:
            return self._view(self.shape, self.strides, dtype=new)
        last = self.shape[-1] * self.dtype.itemsize // new.itemsize
        return self._view((*self.shape[:-1], last), (*self.strides[:-1], new.itemsize), dtype=new)

    def __getitem__(self, key: Any) -> ShapeArray:
        found = indexed(self.shape, self.strides, key if isinstance(key, tuple) else (key,))
        if found is not None:
            return self._view(*found)
        return self.xp.empty(gathered(self.shape, key), self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Writes nothing."""
        found = indexed(self.shape, self.strides, key if isinstance(key, tuple) else (key,))
        if found is not None:
            self.xp.calls.note("assign", (self._view(*found), value))

    # ---- copies --------------------------------------------------------------------------------------

    def copy(self, order: str = "C") -> ShapeArray:
        self.xp.calls.note("copy", (self,))
        return self.xp.laid_out(self.shape, self.dtype, self.shape_strides(order))

    def shape_strides(self, order: str, itemsize: int = 0) -> Shape:
        """Returns the strides of a copy in row-major ("C") memory, or in this array's own order of dims ("K")."""
        size = itemsize or self.dtype.itemsize
        return c_order(self.shape, size) if order == "C" else kept_order(self.shape, self.strides, size)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ShapeArray:
        new = np.dtype(dtype)
        if new == self.dtype and not copy:
            return self
        self.xp.calls.note("astype", (self,), new)
        return self.xp.laid_out(self.shape, new, self.shape_strides(order, new.itemsize))

    def get(self, stream: Any = None, out: Any = None, blocking: bool = True) -> Any:
        """Zeros on the host."""
        if out is None:
            return np.zeros(self.shape, self.dtype)
        out[...] = 0
        return out

    def set(self, host: Any, stream: Any = None) -> None:
        """Copies nothing in."""

    def fill(self, value: Any) -> None:
        """Writes nothing."""

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    # ---- arithmetic ----------------------------------------------------------------------------------

    def _reduced(self, how: str, axis: Any, dtype: Any, keepdims: bool) -> ShapeArray:
        shape, made = reduced(how, self.shape, self.dtype, axis, dtype, keepdims)
        return self.xp.empty(shape, made)

    def sum(self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("sum", axis, dtype, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("mean", axis, dtype, keepdims)

    def prod(self, axis: Any = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("prod", axis, dtype, keepdims)

    def max(self, axis: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("max", axis, None, keepdims)

    def min(self, axis: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("min", axis, None, keepdims)

    def any(self, axis: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("any", axis, None, keepdims)

    def all(self, axis: Any = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("all", axis, None, keepdims)

    def argmax(self, axis: Any = None, dtype: None = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("argmax", axis, None, keepdims)

    def argmin(self, axis: Any = None, dtype: None = None, out: None = None, keepdims: bool = False) -> ShapeArray:
        return self._reduced("argmin", axis, None, keepdims)

    def clip(self, low: Any = None, high: Any = None) -> ShapeArray:
        return self.xp.clip(self, low, high)

    def repeat(self, repeats: int, axis: int | None = None) -> ShapeArray:
        return self.xp.repeat(self, repeats, axis)

    def take(self, indices: Any, axis: int | None = None) -> ShapeArray:
        return self.xp.take(self, indices, axis)

    def cumsum(self, axis: int | None = None, dtype: Any = None) -> ShapeArray:
        return self.xp.cumsum(self, axis, dtype)

    def nonzero(self) -> Any:
        raise TypeError("how many elements of an array are not zero is not known in a shape run")


def _operators() -> None:
    """Gives the class Python's operators, each as NumPy's function of that meaning."""

    def forward(fn: Any) -> Callable[[ShapeArray, Any], ShapeArray]:
        return lambda a, b: a.xp.elementwise(fn, a, b)

    def reflected(fn: Any) -> Callable[[ShapeArray, Any], ShapeArray]:
        return lambda a, b: a.xp.elementwise(fn, b, a)

    def alone(fn: Any) -> Callable[[ShapeArray], ShapeArray]:
        return lambda a: a.xp.elementwise(fn, a)

    def in_place(fn: Any) -> Callable[[ShapeArray, Any], ShapeArray]:
        def noted(a: ShapeArray, b: Any) -> ShapeArray:
            a.xp.calls.note(fn.__name__, (a, b, a))
            return a

        return noted

    for name, fn in {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "truediv": np.true_divide,
        "mod": np.remainder,
        "floordiv": np.floor_divide,
        "pow": np.power,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "lshift": np.left_shift,
        "rshift": np.right_shift,
    }.items():
        setattr(ShapeArray, f"__{name}__", forward(fn))
        setattr(ShapeArray, f"__r{name}__", reflected(fn))
        setattr(ShapeArray, f"__i{name}__", in_place(fn))
    for name, fn in {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }.items():
        setattr(ShapeArray, f"__{name}__", forward(fn))
    for name, one in {"neg": np.negative, "invert": np.invert, "abs": np.absolute}.items():
        setattr(ShapeArray, f"__{name}__", alone(one))
    setattr(ShapeArray, "__matmul__", lambda a, b: a.xp.matmul(a, b))  # noqa: B010


_operators()
