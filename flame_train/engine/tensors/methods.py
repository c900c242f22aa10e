"""What can be computed with a Tensor by name: its methods, named and ordered as torch.Tensor's.

Each finds its op by name in the registry, so this module imports none of them. The ops' docstrings say what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .operators import Number, Operators, TensorT, by_name

Dims = int | Sequence[int] | None


def _spread(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns a size given as `x.reshape(2, 3)` or `x.reshape((2, 3))`."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        return tuple(values[0])
    return tuple(values)


class Methods(Operators[TensorT]):
    """The operators and methods of a Tensor."""

    __slots__ = ()

    # ---- elementwise -----------------------------------------------------------------------------------

    def add(self, other: TensorT | Number, *, alpha: Number = 1) -> TensorT:
        return by_name("add", self, other, alpha=alpha)

    def sub(self, other: TensorT | Number, *, alpha: Number = 1) -> TensorT:
        return by_name("sub", self, other, alpha=alpha)

    def mul(self, other: TensorT | Number) -> TensorT:
        return by_name("mul", self, other)

    def div(self, other: TensorT | Number, *, rounding_mode: str | None = None) -> TensorT:
        return by_name("div", self, other, rounding_mode=rounding_mode)

    def pow(self, exponent: TensorT | Number) -> TensorT:
        return by_name("pow", self, exponent)

    def neg(self) -> TensorT:
        return by_name("neg", self)

    def abs(self) -> TensorT:
        return by_name("abs", self)

    def sign(self) -> TensorT:
        return by_name("sign", self)

    def exp(self) -> TensorT:
        return by_name("exp", self)

    def expm1(self) -> TensorT:
        return by_name("expm1", self)

    def log(self) -> TensorT:
        return by_name("log", self)

    def log1p(self) -> TensorT:
        return by_name("log1p", self)

    def sqrt(self) -> TensorT:
        return by_name("sqrt", self)

    def rsqrt(self) -> TensorT:
        return by_name("rsqrt", self)

    def reciprocal(self) -> TensorT:
        return by_name("reciprocal", self)

    def square(self) -> TensorT:
        return by_name("square", self)

    def sin(self) -> TensorT:
        return by_name("sin", self)

    def cos(self) -> TensorT:
        return by_name("cos", self)

    def tanh(self) -> TensorT:
        return by_name("tanh", self)

    def sigmoid(self) -> TensorT:
        return by_name("sigmoid", self)

    def erf(self) -> TensorT:
        return by_name("erf", self)

    def floor(self) -> TensorT:
        return by_name("floor", self)

    def ceil(self) -> TensorT:
        return by_name("ceil", self)

    def trunc(self) -> TensorT:
        return by_name("trunc", self)

    def round(self, *, decimals: int = 0) -> TensorT:
        return by_name("round", self, decimals=decimals)

    def lerp(self, end: TensorT, weight: TensorT | Number) -> TensorT:
        return by_name("lerp", self, end, weight)

    def addcmul(self, tensor1: TensorT, tensor2: TensorT, *, value: Number = 1) -> TensorT:
        return by_name("addcmul", self, tensor1, tensor2, value=value)

    def addcdiv(self, tensor1: TensorT, tensor2: TensorT, *, value: Number = 1) -> TensorT:
        return by_name("addcdiv", self, tensor1, tensor2, value=value)

    def clamp(self, min: TensorT | Number | None = None, max: TensorT | Number | None = None) -> TensorT:
        return by_name("clamp", self, min, max)

    def maximum(self, other: TensorT) -> TensorT:
        return by_name("maximum", self, other)

    def minimum(self, other: TensorT) -> TensorT:
        return by_name("minimum", self, other)

    def where(self, condition: TensorT, other: TensorT | Number) -> TensorT:
        return by_name("where", condition, self, other)

    def masked_fill(self, mask: TensorT, value: TensorT | Number) -> TensorT:
        return by_name("masked_fill", self, mask, value)

    def lt(self, other: TensorT | Number) -> TensorT:
        return by_name("lt", self, other)

    def le(self, other: TensorT | Number) -> TensorT:
        return by_name("le", self, other)

    def gt(self, other: TensorT | Number) -> TensorT:
        return by_name("gt", self, other)

    def ge(self, other: TensorT | Number) -> TensorT:
        return by_name("ge", self, other)

    def eq(self, other: TensorT | Number) -> TensorT:
        return by_name("eq", self, other)

    def ne(self, other: TensorT | Number) -> TensorT:
        return by_name("ne", self, other)

    def logical_and(self, other: TensorT) -> TensorT:
        return by_name("logical_and", self, other)

    def logical_or(self, other: TensorT) -> TensorT:
        return by_name("logical_or", self, other)

    def logical_xor(self, other: TensorT) -> TensorT:
        return by_name("logical_xor", self, other)

    def logical_not(self) -> TensorT:
        return by_name("logical_not", self)

    def isfinite(self) -> TensorT:
        return by_name("isfinite", self)

    def relu(self) -> TensorT:
        return by_name("relu", self)

    def gelu(self, *, approximate: str = "none") -> TensorT:
        return by_name("gelu", self, approximate=approximate)

    def silu(self) -> TensorT:
        return by_name("silu", self)

    def leaky_relu(self, negative_slope: Number = 0.01) -> TensorT:
        return by_name("leaky_relu", self, negative_slope)

    def softmax(self, dim: int) -> TensorT:
        return by_name("softmax", self, dim)

    def log_softmax(self, dim: int) -> TensorT:
        return by_name("log_softmax", self, dim)

    # ---- reductions ------------------------------------------------------------------------------------

    def sum(self, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("sum", self, dim, keepdim, **numpys)

    def mean(self, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("mean", self, dim, keepdim, **numpys)

    def amax(self, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("amax", self, dim, keepdim, **numpys)

    def amin(self, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("amin", self, dim, keepdim, **numpys)

    def prod(self, dim: int | None = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("prod", self, dim, keepdim, **numpys)

    def var(self, dim: Dims = None, *, correction: Number = 1, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("var", self, dim, correction=correction, keepdim=keepdim, **numpys)

    def std(self, dim: Dims = None, *, correction: Number = 1, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("std", self, dim, correction=correction, keepdim=keepdim, **numpys)

    def max(self, dim: int | TensorT | None = None, keepdim: bool = False, **numpys: Any) -> Any:
        return by_name("max", self, dim, keepdim, **numpys)

    def min(self, dim: int | TensorT | None = None, keepdim: bool = False, **numpys: Any) -> Any:
        return by_name("min", self, dim, keepdim, **numpys)

    def argmax(self, dim: int | None = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("argmax", self, dim, keepdim, **numpys)

    def argmin(self, dim: int | None = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("argmin", self, dim, keepdim, **numpys)

    def norm(self, p: Number | str | None = "fro", dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("norm", self, p, dim, keepdim, **numpys)

    def logsumexp(self, dim: Dims, keepdim: bool = False) -> TensorT:
        return by_name("logsumexp", self, dim, keepdim)

    def any(self, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("any", self, dim, keepdim, **numpys)

    def all(self, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> TensorT:
        return by_name("all", self, dim, keepdim, **numpys)

    def sort(self, dim: int = -1, descending: bool = False, *, stable: bool = False) -> tuple[TensorT, TensorT]:
        return by_name("sort", self, dim, descending, stable=stable)

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[TensorT, TensorT]:
        return by_name("topk", self, k, dim, largest, sorted)

    def cumsum(self, dim: int) -> TensorT:
        return by_name("cumsum", self, dim)

    # ---- shape -----------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> TensorT:
        return by_name("reshape", self, _spread(shape))

    def view(self, *shape: Any) -> TensorT:
        return by_name("view", self, _spread(shape))

    def expand(self, *shape: Any) -> TensorT:
        return by_name("expand", self, _spread(shape))

    def repeat(self, *sizes: Any) -> TensorT:
        return by_name("repeat", self, _spread(sizes))

    def permute(self, *dims: Any) -> TensorT:
        return by_name("permute", self, _spread(dims))

    def transpose(self, dim0: int, dim1: int) -> TensorT:
        return by_name("transpose", self, dim0, dim1)

    def t(self) -> TensorT:
        return by_name("t", self)

    @property
    def T(self) -> TensorT:  # noqa: N802
        """The dims in reverse order: of a matrix rows and columns exchanged."""
        return by_name("permute", self, tuple(reversed(range(len(self.shape)))))

    @property
    def mT(self) -> TensorT:  # noqa: N802
        """The last two dims exchanged."""
        return by_name("transpose", self, -2, -1)

    def movedim(self, source: int | Sequence[int], destination: int | Sequence[int]) -> TensorT:
        return by_name("movedim", self, source, destination)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> TensorT:
        return by_name("flatten", self, start_dim, end_dim)

    def squeeze(self, dim: Dims = None) -> TensorT:
        return by_name("squeeze", self, dim)

    def unsqueeze(self, dim: int) -> TensorT:
        return by_name("unsqueeze", self, dim)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[TensorT, ...]:
        return by_name("split", self, split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[TensorT, ...]:
        return by_name("chunk", self, chunks, dim)

    def unbind(self, dim: int = 0) -> tuple[TensorT, ...]:
        return by_name("unbind", self, dim)

    def repeat_interleave(self, repeats: int, dim: int | None = None) -> TensorT:
        return by_name("repeat_interleave", self, repeats, dim)

    def narrow(self, dim: int, start: int, length: int) -> TensorT:
        return by_name("narrow", self, dim, start, length)

    def flip(self, *dims: Any) -> TensorT:
        return by_name("flip", self, _spread(dims))

    def roll(self, shifts: int | Sequence[int], dims: Dims = None) -> TensorT:
        return by_name("roll", self, shifts, dims)

    def triu(self, diagonal: int = 0) -> TensorT:
        return by_name("triu", self, diagonal)

    def tril(self, diagonal: int = 0) -> TensorT:
        return by_name("tril", self, diagonal)

    # ---- by index --------------------------------------------------------------------------------------

    def gather(self, dim: int, index: TensorT) -> TensorT:
        return by_name("gather", self, dim, index)

    def scatter(self, dim: int, index: TensorT, src: TensorT | Number) -> TensorT:
        return by_name("scatter", self, dim, index, src)

    def scatter_add(self, dim: int, index: TensorT, src: TensorT) -> TensorT:
        return by_name("scatter_add", self, dim, index, src)

    def index_select(self, dim: int, index: TensorT) -> TensorT:
        return by_name("index_select", self, dim, index)

    def take_along_dim(self, indices: TensorT, dim: int | None = None) -> TensorT:
        return by_name("take_along_dim", self, indices, dim)

    # ---- products --------------------------------------------------------------------------------------

    def matmul(self, other: TensorT) -> TensorT:
        return by_name("matmul", self, other)

    def bmm(self, mat2: TensorT) -> TensorT:
        return by_name("bmm", self, mat2)

    def outer(self, vec2: TensorT) -> TensorT:
        return by_name("outer", self, vec2)
