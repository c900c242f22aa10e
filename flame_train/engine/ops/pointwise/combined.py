"""Short sums of products of three tensors, and gated linear units over any dim."""

from __future__ import annotations

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...op_samples import apart
from ...tensors.tensor import Tensor
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import size_along
from ..common.elementwise_codegen import elementwise_kernel


@primitive(torch="addcmul", accepts_integers=True)
def addcmul(xp: Namespace, input: Array, tensor1: Array, tensor2: Array, *, value: float = 1) -> Array:
    """input + value * tensor1 * tensor2

    Args:
        xp: the array namespace.
        input, tensor1, tensor2: they broadcast.
        value: the factor.

    Returns:
        In the shape to which they broadcast.
    """
    return input + value * tensor1 * tensor2


addcmul.vjp("input")(lambda xp, g: g)
addcmul.vjp("tensor1")(lambda xp, g, tensor2, value: g * value * tensor2)
addcmul.vjp("tensor2")(lambda xp, g, tensor1, value: g * value * tensor1)
elementwise_kernel(
    addcmul,
    "input + value * tensor1 * tensor2",
    input="g",
    tensor1="g * value * tensor2",
    tensor2="g * value * tensor1",
)
addcmul.perf_samples(sample((1280, 1280), (1280, 1280), (1280, 1280), value=0.25))
addcmul.samples(sample((2, 3), (2, 3), (2, 3)), sample((3, 1), (4,), (3, 4), value=-0.5), sample((0, 2), (2,), (1,)))


@primitive(torch="addcdiv")
def addcdiv(xp: Namespace, input: Array, tensor1: Array, tensor2: Array, *, value: float = 1) -> Array:
    """input + value * tensor1 / tensor2

    Args:
        xp, input, tensor1, tensor2, value: as in `addcmul`.

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


for _op in (addcmul, addcdiv):
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
