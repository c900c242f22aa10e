"""What the operators of Python mean for a Tensor, as for torch.Tensor: x + y, x @ y, x < y, x[index]."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Generic, TypeAlias, TypeVar

from ..dtype import bool_, float32, is_float
from ..op import REGISTRY
from .tensor_base import TensorBase

TensorT = TypeVar("TensorT")
"""`Tensor`, which is made of these classes and passes itself to them: `class Tensor(Methods["Tensor"])`."""

Number = float
Index: TypeAlias = int | slice | EllipsisType | Sequence[int] | TensorT | None


def by_name(op: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the op of that name. Ops import tensors, so tensors look ops up instead of importing them."""
    return REGISTRY[op](*args, **kwargs)


def _comparable(value: Any) -> bool:
    return isinstance(value, (Operators, bool, int, float))


def _truth(value: Any) -> Any:
    """Returns an operand of & | ^ ~, which are logical here. Raises TypeError unless it is boolean."""
    if getattr(value, "dtype", None) != bool_:
        raise TypeError("& | ^ ~ are for boolean tensors here; compare first, or use logical_and and its kin")
    return value


class Operators(TensorBase, Generic[TensorT]):
    """The operators of a Tensor."""

    __slots__ = ()

    def __add__(self, other: Any) -> TensorT:
        return by_name("add", self, other)

    def __sub__(self, other: Any) -> TensorT:
        return by_name("sub", self, other)

    def __mul__(self, other: Any) -> TensorT:
        return by_name("mul", self, other)

    def __truediv__(self, other: Any) -> TensorT:
        return by_name("div", self, other)

    def __radd__(self, other: Any) -> TensorT:
        return by_name("add", self, other)

    def __rsub__(self, other: Any) -> TensorT:
        return by_name("rsub", self, other)

    def __rmul__(self, other: Any) -> TensorT:
        return by_name("mul", self, other)

    def __rtruediv__(self, other: Any) -> TensorT:
        return by_name("mul", by_name("reciprocal", self), other)

    def __floordiv__(self, other: Any) -> TensorT:
        return by_name("div", self, other, rounding_mode="floor")

    def __rfloordiv__(self, other: Number) -> TensorT:
        like: Any = by_name("cast", self, float32) if isinstance(other, float) and not is_float(self.dtype) else self
        return by_name("div", by_name("clone", like.detach()).fill_(other), like, rounding_mode="floor")

    def __pow__(self, exponent: Any) -> TensorT:
        return by_name("pow", self, exponent)

    def __rpow__(self, base: Number) -> TensorT:
        return by_name("pow", base, self)

    def __neg__(self) -> TensorT:
        return by_name("neg", self)

    def __abs__(self) -> TensorT:
        return by_name("abs", self)

    def __matmul__(self, other: TensorT) -> TensorT:
        return by_name("matmul", self, other)

    def __getitem__(self, index: Index[TensorT] | tuple[Index[TensorT], ...]) -> TensorT:
        return by_name("getitem", self, index)

    def __lt__(self, other: Any) -> TensorT:
        return by_name("lt", self, other)

    def __le__(self, other: Any) -> TensorT:
        return by_name("le", self, other)

    def __gt__(self, other: Any) -> TensorT:
        return by_name("gt", self, other)

    def __ge__(self, other: Any) -> TensorT:
        return by_name("ge", self, other)

    def __eq__(self, other: object) -> TensorT:  # type: ignore[override]
        return by_name("eq", self, other) if _comparable(other) else NotImplemented

    def __ne__(self, other: object) -> TensorT:  # type: ignore[override]
        return by_name("ne", self, other) if _comparable(other) else NotImplemented

    __hash__ = object.__hash__  # a tensor is itself, whatever it holds

    def __and__(self, other: TensorT) -> TensorT:
        return by_name("logical_and", _truth(self), _truth(other))

    def __or__(self, other: TensorT) -> TensorT:
        return by_name("logical_or", _truth(self), _truth(other))

    def __xor__(self, other: TensorT) -> TensorT:
        return by_name("logical_xor", _truth(self), _truth(other))

    def __invert__(self) -> TensorT:
        return by_name("logical_not", _truth(self))
