"""What can be computed with a Tensor: its operators and methods, named and ordered as torch.Tensor's.

Each finds its op by name in the registry, so this module imports none of them. The ops' docstrings say what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

from .dtype import DType, bool_, float32, is_float
from .op import REGISTRY

if TYPE_CHECKING:
    from .tensor import Tensor

    Index: TypeAlias = int | slice | EllipsisType | Sequence[int] | Tensor | None

Number = float
Dims = int | Sequence[int] | None


def _op(name: str, *args: Any, **kwargs: Any) -> Any:
    return REGISTRY[name](*args, **kwargs)


def _spread(values: tuple[Any, ...]) -> tuple[int, ...]:
    """`x.reshape(2, 3)` and `x.reshape((2, 3))` mean the same."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        return tuple(values[0])
    return tuple(values)


def _comparable(value: Any) -> bool:
    return isinstance(value, (Methods, bool, int, float))


def _truth(value: Any) -> Any:
    """What & | ^ ~ work on: truth values, not the bits of numbers."""
    if getattr(value, "dtype", None) != bool_:
        raise TypeError("& | ^ ~ are for boolean tensors here; compare first, or use logical_and and its kin")
    return value


class Methods:
    """The operators and methods of a Tensor."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> DType: ...

    # ---- operators ---------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return _op("add", self, other)

    def __sub__(self, other: Any) -> Tensor:
        return _op("sub", self, other)

    def __mul__(self, other: Any) -> Tensor:
        return _op("mul", self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return _op("div", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _op("add", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _op("rsub", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _op("mul", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _op("mul", _op("reciprocal", self), other)

    def __floordiv__(self, other: Any) -> Tensor:
        return _op("div", self, other, rounding_mode="floor")

    def __rfloordiv__(self, other: Number) -> Tensor:
        like: Any = _op("cast", self, float32) if isinstance(other, float) and not is_float(self.dtype) else self
        return _op("div", _op("clone", like.detach()).fill_(other), like, rounding_mode="floor")

    def __pow__(self, exponent: Any) -> Tensor:
        return _op("pow", self, exponent)

    def __rpow__(self, base: Number) -> Tensor:
        return _op("pow", base, self)

    def __neg__(self) -> Tensor:
        return _op("neg", self)

    def __abs__(self) -> Tensor:
        return _op("abs", self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return _op("matmul", self, other)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        return _op("getitem", self, index)

    def __lt__(self, other: Any) -> Tensor:
        return _op("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return _op("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _op("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _op("ge", self, other)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _op("eq", self, other) if _comparable(other) else NotImplemented

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _op("ne", self, other) if _comparable(other) else NotImplemented

    __hash__ = object.__hash__  # a tensor is itself, whatever it holds

    def __and__(self, other: Tensor) -> Tensor:
        return _op("logical_and", _truth(self), _truth(other))

    def __or__(self, other: Tensor) -> Tensor:
        return _op("logical_or", _truth(self), _truth(other))

    def __xor__(self, other: Tensor) -> Tensor:
        return _op("logical_xor", _truth(self), _truth(other))

    def __invert__(self) -> Tensor:
        return _op("logical_not", _truth(self))

    # ---- elementwise -----------------------------------------------------------------------------------

    def add(self, other: Tensor | Number, *, alpha: Number = 1) -> Tensor:
        return _op("add", self, other, alpha=alpha)

    def sub(self, other: Tensor | Number, *, alpha: Number = 1) -> Tensor:
        return _op("sub", self, other, alpha=alpha)

    def mul(self, other: Tensor | Number) -> Tensor:
        return _op("mul", self, other)

    def div(self, other: Tensor | Number, *, rounding_mode: str | None = None) -> Tensor:
        return _op("div", self, other, rounding_mode=rounding_mode)

    def pow(self, exponent: Tensor | Number) -> Tensor:
        return _op("pow", self, exponent)

    def neg(self) -> Tensor:
        return _op("neg", self)

    def abs(self) -> Tensor:
        return _op("abs", self)

    def sign(self) -> Tensor:
        return _op("sign", self)

    def exp(self) -> Tensor:
        return _op("exp", self)

    def expm1(self) -> Tensor:
        return _op("expm1", self)

    def log(self) -> Tensor:
        return _op("log", self)

    def log1p(self) -> Tensor:
        return _op("log1p", self)

    def sqrt(self) -> Tensor:
        return _op("sqrt", self)

    def rsqrt(self) -> Tensor:
        return _op("rsqrt", self)

    def reciprocal(self) -> Tensor:
        return _op("reciprocal", self)

    def square(self) -> Tensor:
        return _op("square", self)

    def sin(self) -> Tensor:
        return _op("sin", self)

    def cos(self) -> Tensor:
        return _op("cos", self)

    def tanh(self) -> Tensor:
        return _op("tanh", self)

    def sigmoid(self) -> Tensor:
        return _op("sigmoid", self)

    def erf(self) -> Tensor:
        return _op("erf", self)

    def floor(self) -> Tensor:
        return _op("floor", self)

    def ceil(self) -> Tensor:
        return _op("ceil", self)

    def trunc(self) -> Tensor:
        return _op("trunc", self)

    def round(self, *, decimals: int = 0) -> Tensor:
        return _op("round", self, decimals=decimals)

    def lerp(self, end: Tensor, weight: Tensor | Number) -> Tensor:
        return _op("lerp", self, end, weight)

    def clamp(self, min: Tensor | Number | None = None, max: Tensor | Number | None = None) -> Tensor:
        return _op("clamp", self, min, max)

    def maximum(self, other: Tensor) -> Tensor:
        return _op("maximum", self, other)

    def minimum(self, other: Tensor) -> Tensor:
        return _op("minimum", self, other)

    def where(self, condition: Tensor, other: Tensor | Number) -> Tensor:
        return _op("where", condition, self, other)

    def masked_fill(self, mask: Tensor, value: Tensor | Number) -> Tensor:
        return _op("masked_fill", self, mask, value)

    def lt(self, other: Tensor | Number) -> Tensor:
        return _op("lt", self, other)

    def le(self, other: Tensor | Number) -> Tensor:
        return _op("le", self, other)

    def gt(self, other: Tensor | Number) -> Tensor:
        return _op("gt", self, other)

    def ge(self, other: Tensor | Number) -> Tensor:
        return _op("ge", self, other)

    def eq(self, other: Tensor | Number) -> Tensor:
        return _op("eq", self, other)

    def ne(self, other: Tensor | Number) -> Tensor:
        return _op("ne", self, other)

    def logical_and(self, other: Tensor) -> Tensor:
        return _op("logical_and", self, other)

    def logical_or(self, other: Tensor) -> Tensor:
        return _op("logical_or", self, other)

    def logical_xor(self, other: Tensor) -> Tensor:
        return _op("logical_xor", self, other)

    def logical_not(self) -> Tensor:
        return _op("logical_not", self)

    def isfinite(self) -> Tensor:
        return _op("isfinite", self)

    def relu(self) -> Tensor:
        return _op("relu", self)

    def softmax(self, dim: int) -> Tensor:
        return _op("softmax", self, dim)

    def log_softmax(self, dim: int) -> Tensor:
        return _op("log_softmax", self, dim)

    # ---- reductions ------------------------------------------------------------------------------------

    def sum(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return _op("sum", self, dim, keepdim)

    def mean(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return _op("mean", self, dim, keepdim)

    def amax(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return _op("amax", self, dim, keepdim)

    def amin(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return _op("amin", self, dim, keepdim)

    def prod(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return _op("prod", self, dim, keepdim)

    def var(self, dim: Dims = None, *, correction: Number = 1, keepdim: bool = False) -> Tensor:
        return _op("var", self, dim, correction=correction, keepdim=keepdim)

    def std(self, dim: Dims = None, *, correction: Number = 1, keepdim: bool = False) -> Tensor:
        return _op("std", self, dim, correction=correction, keepdim=keepdim)

    def max(self, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
        return _op("max", self, dim, keepdim)

    def min(self, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
        return _op("min", self, dim, keepdim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return _op("argmax", self, dim, keepdim)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return _op("argmin", self, dim, keepdim)

    def norm(self, p: Number | str = "fro", dim: Dims = None, keepdim: bool = False) -> Tensor:
        return _op("norm", self, p, dim, keepdim)

    def logsumexp(self, dim: Dims, keepdim: bool = False) -> Tensor:
        return _op("logsumexp", self, dim, keepdim)

    def cumsum(self, dim: int) -> Tensor:
        return _op("cumsum", self, dim)

    # ---- shape -----------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> Tensor:
        return _op("reshape", self, _spread(shape))

    def view(self, *shape: Any) -> Tensor:
        return _op("view", self, _spread(shape))

    def expand(self, *shape: Any) -> Tensor:
        return _op("expand", self, _spread(shape))

    def repeat(self, *sizes: Any) -> Tensor:
        return _op("repeat", self, _spread(sizes))

    def permute(self, *dims: Any) -> Tensor:
        return _op("permute", self, _spread(dims))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        return _op("transpose", self, dim0, dim1)

    @property
    def T(self) -> Tensor:  # noqa: N802
        """The dims in reverse order: of a matrix rows and columns exchanged."""
        return _op("permute", self, tuple(reversed(range(len(self.shape)))))

    @property
    def mT(self) -> Tensor:  # noqa: N802
        """The last two dims exchanged."""
        return _op("transpose", self, -2, -1)

    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
        return _op("movedim", self, source, destination)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        return _op("flatten", self, start_dim, end_dim)

    def squeeze(self, dim: Dims = None) -> Tensor:
        return _op("squeeze", self, dim)

    def unsqueeze(self, dim: int) -> Tensor:
        return _op("unsqueeze", self, dim)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        return _op("split", self, split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        return _op("chunk", self, chunks, dim)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        return _op("narrow", self, dim, start, length)

    def flip(self, *dims: Any) -> Tensor:
        return _op("flip", self, _spread(dims))

    def roll(self, shifts: int | Sequence[int], dims: Dims = None) -> Tensor:
        return _op("roll", self, shifts, dims)

    def triu(self, diagonal: int = 0) -> Tensor:
        return _op("triu", self, diagonal)

    def tril(self, diagonal: int = 0) -> Tensor:
        return _op("tril", self, diagonal)

    # ---- by index --------------------------------------------------------------------------------------

    def gather(self, dim: int, index: Tensor) -> Tensor:
        return _op("gather", self, dim, index)

    def scatter(self, dim: int, index: Tensor, src: Tensor | Number) -> Tensor:
        return _op("scatter", self, dim, index, src)

    def scatter_add(self, dim: int, index: Tensor, src: Tensor) -> Tensor:
        return _op("scatter_add", self, dim, index, src)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        return _op("index_select", self, dim, index)

    def take_along_dim(self, indices: Tensor, dim: int | None = None) -> Tensor:
        return _op("take_along_dim", self, indices, dim)

    # ---- products --------------------------------------------------------------------------------------

    def matmul(self, other: Tensor) -> Tensor:
        return _op("matmul", self, other)

    def bmm(self, mat2: Tensor) -> Tensor:
        return _op("bmm", self, mat2)

    def outer(self, vec2: Tensor) -> Tensor:
        return _op("outer", self, vec2)
