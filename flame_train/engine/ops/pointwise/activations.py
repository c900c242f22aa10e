"""Activations: gelu and its kin, the rectifiers, and gated units. Names, defaults and meaning as in PyTorch."""

from __future__ import annotations

import math

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, Op, primitive, sample
from ..common import special
from ..common.conditions import floating
from ..common.dims import size_along
from ..common.elementwise_codegen import elementwise_kernel
from .unary import sigmoid_value, unary


def _silu_gradient(xp: Namespace, g: Array, input: Array) -> Array:
    s = sigmoid_value(xp, input)
    return g * s * (1.0 + input * (1.0 - s))


silu = unary(
    "silu",
    "input * sigmoid(input)",
    lambda xp, input: input * sigmoid_value(xp, input),
    _silu_gradient,
    kernel=("silu(input)", "g * silu_derivative(input)"),
    torch="nn.functional.silu",
)

silu.perf_samples(sample((4097, 1283)))


def _quick_gelu_gradient(xp: Namespace, g: Array, input: Array) -> Array:
    s = sigmoid_value(xp, 1.702 * input)
    return g * s * (1.0 + 1.702 * input * (1.0 - s))


quick_gelu = unary(
    "quick_gelu",
    "input * sigmoid(1.702 * input), the activation of OpenAI's CLIP (its `QuickGELU`)",
    lambda xp, input: input * sigmoid_value(xp, 1.702 * input),
    _quick_gelu_gradient,
    kernel=(
        "input * sigmoid(1.702f * input)",
        "Logistic l(1.702f * input); g * (l.s + 1.702f * input * l.s * l.rest)",
    ),
    torch=None,
)

_INV_SQRT2 = 1.0 / math.sqrt(2.0)

_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@primitive(torch="nn.functional.gelu")
def gelu(xp: Namespace, input: Array, *, approximate: str = "none") -> Array:
    """input * Phi(input); with approximate="tanh" Hendrycks and Gimpel's formula (arXiv 1606.08415)"""
    return input * _phi(xp, input, approximate)


gelu.vjp("input")(lambda xp, g, input, approximate: g * gelu_derivative(xp, input, approximate))

elementwise_kernel(
    gelu,
    "gelu(input)",
    input="g * gelu_derivative(input)",
    when=lambda approximate: approximate == "none" or "approximate asks for another formula",
)

elementwise_kernel(
    gelu,
    "gelu_tanh(input)",
    input="g * gelu_tanh_derivative(input)",
    when=lambda approximate: approximate == "tanh" or "approximate asks for another formula",
)

gelu.samples(sample((3, 5)), sample((3, 5), approximate="tanh"), sample((0,)))

gelu.errors(ErrorSample(sample((2,), approximate="fast"), ValueError, "'none' or 'tanh', got 'fast'"))


def _tanh_argument(x: Array) -> Array:
    return math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)


def _phi(xp: Namespace, x: Array, approximate: str) -> Array:
    """Returns the normal distribution function, exact or by tanh."""
    if approximate == "tanh":
        return 0.5 * (1.0 + xp.tanh(_tanh_argument(x)))
    if approximate != "none":
        raise ValueError(f"gelu: expected approximate='none' or 'tanh', got {approximate!r}")
    return 0.5 * (1.0 + special.erf(xp, x * _INV_SQRT2))


def gelu_derivative(xp: Namespace, x: Array, approximate: str) -> Array:
    """d gelu(x) / dx"""
    if approximate == "tanh":
        t = xp.tanh(_tanh_argument(x))
        inner = math.sqrt(2.0 / math.pi) * (1.0 + 3.0 * 0.044715 * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    return gelu_value_and_derivative(xp, x)[1]


def gelu_value_and_derivative(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Returns the exact gelu and its derivative, which share the error function."""
    phi = _phi(xp, x, "none")
    return x * phi, phi + x * _INV_SQRT_2PI * xp.exp(-0.5 * x * x)


def gelu_value(xp: Namespace, x: Array) -> Array:
    """Returns the exact gelu of an array, for ops that contain it."""
    return x * _phi(xp, x, "none")


def halves(x: Array, op: str) -> tuple[Array, Array]:
    """The value and the gate, the two halves of the last dim, as views. Raises ShapeError unless its size is even."""
    if size_along(x.shape, -1, op) % 2:
        raise ShapeError(f"{op}: expected an even last dim holding value and gate, got {tuple(x.shape)}")
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


def gated_kernels(op: Op, activation: str) -> None:
    """Declares the kernels of a gated unit, for an activation of `dtypes.cuh` that has a derivative there."""

    def halved(input: Array) -> str:
        return floating(input) if input.ndim and not input.shape[-1] % 2 else "arguments that are refused"

    def forward(k: Launcher, input: Array) -> Array:
        value, gate = halves(input, op.name)
        return k.elementwise((f"value * {activation}(gate)",), {"value": value, "gate": gate}, (input.dtype,))[0]

    def backward(k: Launcher, g: Array, input: Array) -> Array:
        value, gate = halves(input, op.name)
        expressions = f"g * {activation}(gate)", f"g * value * {activation}_derivative(gate)"
        dinput = k.empty(input.shape, input.dtype)
        operands = {"g": g, "value": value, "gate": gate}
        k.elementwise(expressions, operands, (input.dtype,) * 2, out=halves(dinput, op.name))
        return dinput

    op.cuda("generated", when=halved)(forward)
    op.cuda_vjp("generated", "input", when=halved)(backward)
