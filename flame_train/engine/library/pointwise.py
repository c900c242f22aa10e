"""Functions of values that nothing in the trainer calls. Names and meaning as in PyTorch."""

from __future__ import annotations

import math

from ...errors import ShapeError
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, is_float
from ..namespace import Namespace
from ..op import ErrorSample, composite, primitive, sample
from ..op_samples import NOT_BROADCAST, apart, positive
from ..ops.common import special
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import size_along
from ..ops.common.elementwise_codegen import elementwise_kernel
from ..ops.pointwise.unary import unary
from ..tensors.tensor import Tensor

expm1 = unary(
    "expm1", "e ** input - 1, exact near zero", lambda xp, input: xp.expm1(input), lambda xp, g, out: g * (out + 1.0)
)

log1p = unary(
    "log1p",
    "The natural logarithm of 1 + input, exact near zero",
    lambda xp, input: xp.log1p(input),
    lambda xp, g, input: g / (input + 1.0),
    make=positive,
)

rsqrt = unary(
    "rsqrt",
    "1 / sqrt(input)",
    lambda xp, input: 1.0 / xp.sqrt(input),
    lambda xp, g, out: -0.5 * g * out * out * out,
    kernel=("rsqrtf(input)", "-0.5f * g * out * out * out"),
    make=positive,
)

sin = unary(
    "sin", "The sine of input, in radians", lambda xp, input: xp.sin(input), lambda xp, g, input: g * xp.cos(input)
)

cos = unary(
    "cos", "The cosine of input, in radians", lambda xp, input: xp.cos(input), lambda xp, g, input: -g * xp.sin(input)
)

erf = unary(
    "erf",
    "2 / sqrt(pi) * integral of exp(-t^2) from 0 to input",
    special.erf,
    lambda xp, g, input: g * (2.0 / math.sqrt(math.pi)) * xp.exp(-input * input),
    kernel=("erff(input)", "g * 1.1283791670955126f * e_to(-input * input)"),
)


def _zero(xp: Namespace, g: Array) -> Array:
    return xp.zeros_like(g)


floor = unary(
    "floor",
    "The largest whole number not above input; the gradient is zero",
    lambda xp, input: xp.floor(input),
    _zero,
    integers=True,
)

trunc = unary(
    "trunc", "input without its fraction; the gradient is zero", lambda xp, input: xp.trunc(input), _zero, integers=True
)


@primitive(torch="round", accepts_integers=True)
def round(xp: Namespace, input: Array, *, decimals: int = 0) -> Array:
    """The nearest number of so many decimals, of two equally near the even one; the gradient is zero"""
    if decimals == 0:
        return xp.rint(input) if is_float(input.dtype) else input.copy()
    scale = 10.0 ** (-decimals if decimals < 0 else decimals)
    return xp.rint(input / scale) * scale if decimals < 0 else xp.rint(input * scale) / scale


round.vjp("input")(_zero)

elementwise_kernel(round, "rintf(input)", input="0.f", when=lambda decimals: decimals == 0 or "only whole numbers")

round.samples(sample((3, 5)), sample((7,), decimals=2), sample((7,), decimals=-1))

sign = unary(
    "sign",
    "-1, 0 or 1; the gradient is zero",
    lambda xp, input: input.copy() if input.dtype == bool else xp.sign(input),
    lambda xp, g: xp.zeros_like(g),
    integers=True,
    make=apart,
)


@primitive(torch="addcdiv")
def addcdiv(xp: Namespace, input: Array, tensor1: Array, tensor2: Array, *, value: float = 1) -> Array:
    """input + value * tensor1 / tensor2

    Args:
        input, tensor1, tensor2, value: as in `addcmul`.

    Returns:
        In the shape to which they broadcast.
    """
    return input + value * tensor1 / tensor2


addcdiv.vjp("input")(lambda xp, g: g)

addcdiv.vjp("tensor1")(lambda xp, g, tensor2, value: g * value / tensor2)

addcdiv.vjp("tensor2")(lambda xp, g, tensor1, tensor2, value: -g * value * tensor1 / (tensor2 * tensor2))

elementwise_kernel(
    addcdiv,
    "input + value * tensor1 / tensor2",
    input="g",
    tensor1="g * value / tensor2",
    tensor2="-g * value * tensor1 / (tensor2 * tensor2)",
)

addcdiv.samples(sample((2, 3), (2, 3), apart(2, 3)), sample((3, 1), (4,), apart(3, 4), value=-0.5))

for _op in (addcdiv,):
    _op.errors(ErrorSample(sample((2, 3), (4,), (1,)), ShapeError, "do not broadcast together"))


@composite(torch="nn.functional.glu")
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """a * sigmoid(b) for input = [a, b] along dim (arXiv 1612.08083)"""
    n = size_along(input.shape, dim, "glu")
    if n % 2:
        raise ShapeError(f"glu: expected an even size of dim {dim} holding value and gate, got {input.shape}")
    a, b = input.split(n // 2, dim) if n else (input, input)
    return a * b.sigmoid()


def _no_gate(input: Array, dim: int) -> str:
    if not -input.ndim <= dim < input.ndim or input.shape[dim] % 2 or not input.size:
        return "no value and gate"
    return same(AT_MOST_FP32, input)


def _halves(x: Array, dim: int) -> tuple[Array, Array]:
    middle, front = x.shape[dim] // 2, (slice(None),) * (dim % x.ndim)
    return x[(*front, slice(0, middle))], x[(*front, slice(middle, None))]


@glu.cuda("generated", when=_no_gate)
def _(k: Launcher, input: Array, dim: int) -> Array:
    value, gate = _halves(input, dim)
    return k.elementwise(("value * sigmoid(gate)",), {"value": value, "gate": gate}, (input.dtype,))[0]


@glu.cuda_vjp("generated", "input", when=_no_gate)
def _(k: Launcher, g: Array, input: Array, dim: int) -> Array:
    out = k.empty(input.shape, input.dtype)
    value, gate = _halves(input, dim)
    slopes = "g * sigmoid(gate)", "Logistic l(gate); g * value * l.s * l.rest"
    k.elementwise(slopes, {"g": g, "value": value, "gate": gate}, (out.dtype,) * 2, g.shape, _halves(out, dim))
    return out


glu.samples(sample((2, 4)), sample((4, 3), 0))

glu.perf_samples(sample((3, 70, 256)), sample((3, 66, 40), 1), sample((4, 66, 33), -2))

glu.errors(ErrorSample(sample((2, 3)), ShapeError, "glu: expected an even size of dim -1"))


def _won(xp: Namespace, g: Array, tie: Array, lost: Array) -> Array:
    """The gradient of one of a pair: half at a tie, none where it lost. A pair with NaN has no loser, so none hides."""
    return xp.where(tie, 0.5 * g, xp.where(lost, 0.0, g))


@primitive(torch="maximum", accepts_integers=True)
def maximum(xp: Namespace, input: Array, other: Array) -> Array:
    """The larger of each pair; a tie shares the gradient evenly"""
    return xp.maximum(input, other)


maximum.vjp("input")(lambda xp, g, input, other: _won(xp, g, input == other, input < other))

maximum.vjp("other")(lambda xp, g, input, other: _won(xp, g, input == other, other < input))


@primitive(torch="minimum", accepts_integers=True)
def minimum(xp: Namespace, input: Array, other: Array) -> Array:
    """The smaller of each pair; a tie shares the gradient evenly"""
    return xp.minimum(input, other)


minimum.vjp("input")(lambda xp, g, input, other: _won(xp, g, input == other, input > other))

minimum.vjp("other")(lambda xp, g, input, other: _won(xp, g, input == other, other > input))

for _op in (maximum, minimum):
    elementwise_kernel(_op)
    _op.errors(NOT_BROADCAST)
    _op.samples(sample((3, 4), (3, 4)), sample((2, 1, 4), (3, 1)))
