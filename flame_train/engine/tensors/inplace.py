"""Writing into a tensor's memory: gradients, buffers, weights between steps.

The graph does not record writes. So while graphs are recorded a tensor that requires grad can neither be written nor
be written into another. Every write is noted (`autograd/versions.py`), so that a graph that saved the old values
refuses to run. Where a write would lose a gradient, `x += y` and its kin bind x to a new tensor instead.
"""

from __future__ import annotations

from typing import Any, Generic

import numpy as np

from ...errors import ShapeError, kind_of
from ..autograd.versions import VERSIONS
from ..dtype import Array, is_float
from ..mode import mode, no_grad
from ..op import REGISTRY
from .indexing import steps
from .operators import Number, TensorT
from .tensor_base import TensorBase


class InPlace(TensorBase, Generic[TensorT]):
    """The methods of a Tensor that write into it; each returns it.

    All raise RuntimeError where a gradient would go wrong, ShapeError where the value's shape does not fit. They
    raise TypeError where the value is neither a Tensor nor a number.
    """

    __slots__ = ()

    def _check_writable(self) -> None:
        if self._node is not None or (self.requires_grad and mode().grad):
            raise RuntimeError(
                "a tensor that requires grad is not written in place here; make a new one (x = x + y), "
                "or use no_grad(), or detach()"
            )

    def _put(self, op: str, places: Any, value: Any) -> Any:
        """Writes `value`, a Tensor or numbers, to self[places]."""
        self._check_writable()
        array = self._fitting(op, value)
        first, rest = steps(self.backend.xp, places, self.data.shape)
        part = self.data[first] if rest else self.data
        try:
            part[rest or first] = array
        except ValueError as e:
            raise ShapeError(
                f"{op}: a value of shape {np.shape(array)} does not fit into that part of {tuple(self.data.shape)}"
            ) from e
        VERSIONS.mark_written(self.data)
        return self

    def _fitting(self, op: str, value: Any) -> Any:
        """Converts `value` for a write: a number, or an array of this dtype and device, leading dims of size 1 cut."""
        _check_lost(op, (value,))
        array: Array = value.data if hasattr(value, "_leaf") else np.asarray(value)
        if not is_float(array.dtype) and array.dtype.kind not in "biu":
            raise TypeError(f"{op}: expected a Tensor or a number, got {kind_of(value)}")
        if not hasattr(value, "_leaf"):
            if not array.ndim:
                return value
            array = self.backend.to_device(array)
        elif value.backend is not self.backend:
            where = f"on {self.backend.name}, got one on {value.device}"
            raise RuntimeError(f"{op}: expected a tensor {where}; move it with .to")
        ones = next((i for i, n in enumerate(array.shape) if n != 1), array.ndim)
        return array.reshape(array.shape[ones:]).astype(self.dtype, copy=False)

    def _written(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Writes the result of `op` on this tensor into it."""
        self._check_writable()
        _check_lost(f"{op}_", args)
        with no_grad():
            made: Any = REGISTRY[op](self, *args, **kwargs)
        if is_float(made.dtype) and not is_float(self.dtype):
            raise TypeError(f"{op}_: the result is {made.dtype.name}, which a tensor of {self.dtype.name} cannot hold")
        return self._put(f"{op}_", ..., made)

    def _augmented(self, op: str, other: Any, **kwargs: Any) -> Any:
        """Computes `x += y` in place, or where that would lose a gradient as a new tensor like this one."""
        computed = self._node is not None or getattr(other, "requires_grad", False)
        if not (mode().grad and computed) or (self._node is None and self.requires_grad):
            return self._written(op, other, **kwargs)
        made = REGISTRY[op](self, other, **kwargs)
        if made.shape != self.data.shape:
            raise ShapeError(f"{op}_: the result of shape {made.shape} does not fit {tuple(self.data.shape)}")
        return made.to(self.dtype)

    # ---- methods -----------------------------------------------------------------------------------

    def copy_(self, src: TensorT) -> TensorT:
        """Writes the values of `src`, which broadcasts, here; cast to this dtype."""
        if not hasattr(src, "_leaf"):
            raise TypeError(f"copy_: expected a Tensor, got {kind_of(src)}; fill_ writes a number")
        return self._put("copy_", ..., src)

    def fill_(self, value: Number) -> TensorT:
        """Writes one number to every element."""
        return self._put("fill_", ..., value)

    def zero_(self) -> TensorT:
        """Writes 0 to every element."""
        return self.fill_(0)

    def add_(self, other: TensorT | Number, *, alpha: Number = 1) -> TensorT:
        return self._written("add", other, alpha=alpha)

    def sub_(self, other: TensorT | Number, *, alpha: Number = 1) -> TensorT:
        return self._written("sub", other, alpha=alpha)

    def mul_(self, other: TensorT | Number) -> TensorT:
        return self._written("mul", other)

    def div_(self, other: TensorT | Number) -> TensorT:
        return self._written("div", other)

    def relu_(self) -> TensorT:
        return self._written("relu")

    def clamp_(self, min: TensorT | Number | None = None, max: TensorT | Number | None = None) -> TensorT:
        return self._written("clamp", min, max)

    # ---- operators ---------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: TensorT | Number) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        self._put("setitem", tuple([p.data if hasattr(p, "_leaf") else p for p in parts]), value)

    def __iadd__(self, other: Any) -> TensorT:
        return self._augmented("add", other)

    def __isub__(self, other: Any) -> TensorT:
        return self._augmented("sub", other)

    def __imul__(self, other: Any) -> TensorT:
        return self._augmented("mul", other)

    def __itruediv__(self, other: Any) -> TensorT:
        return self._augmented("div", other)

    def __ifloordiv__(self, other: Any) -> TensorT:
        return self._augmented("div", other, rounding_mode="floor")

    def __ipow__(self, other: Any) -> TensorT:
        return self._augmented("pow", other)

    def __iand__(self, other: Any) -> TensorT:
        return self._put("and", ..., self & other)

    def __ior__(self, other: Any) -> TensorT:
        return self._put("or", ..., self | other)

    def __ixor__(self, other: Any) -> TensorT:
        return self._put("xor", ..., self ^ other)


def _check_lost(op: str, values: tuple[Any, ...]) -> None:
    """Raises RuntimeError if graphs are recorded and one of `values`, which are to be written, requires grad."""
    if mode().grad and any(getattr(v, "requires_grad", False) for v in values):
        raise RuntimeError(
            f"{op}: what is written requires grad, and its gradient would be lost; write its detach(), "
            "or make a new tensor with where, stack or cat"
        )
