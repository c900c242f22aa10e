"""Activations that no network of the trainer has: rectifiers and squashing functions. As in PyTorch."""

from __future__ import annotations

from ...errors import ShapeError
from ..autograd.grad_target import GradTargets
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, promote_floats
from ..namespace import Namespace
from ..op import ErrorSample, primitive, sample
from ..op_samples import Values, apart, of_one
from ..ops.common.conditions import floating
from ..ops.common.dims import Shape
from ..ops.common.elementwise_codegen import broadcast_grad, elementwise_kernel
from ..ops.pointwise.activations import gated_kernels, halves
from ..ops.pointwise.unary import sigmoid_value, unary
from ..sums import accurate_sum

relu = unary(
    "relu",
    "max(input, 0); the gradient at zero is zero",
    lambda xp, input: xp.maximum(input, 0),
    lambda xp, g, out: xp.where(out <= 0, 0.0, g),  # so that the gradient at NaN is not hidden
    torch="nn.functional.relu",
    integers=True,
    make=apart,
)


@primitive(torch="nn.functional.leaky_relu")
def leaky_relu(xp: Namespace, input: Array, negative_slope: float = 0.01) -> Array:
    """input where it is positive, else negative_slope * input"""
    return xp.where(input > 0, input, negative_slope * input)


leaky_relu.vjp("input")(lambda xp, g, input, negative_slope: xp.where(input > 0, g, negative_slope * g))

elementwise_kernel(leaky_relu)

leaky_relu.samples(sample(apart(3, 5)), sample(apart(4), 0.2), sample((0, 2)))


@primitive(torch="nn.functional.elu")
def elu(xp: Namespace, input: Array, alpha: float = 1.0) -> Array:
    """input where it is positive, else alpha * (exp(input) - 1) (arXiv 1511.07289)"""
    return xp.where(input > 0, input, alpha * xp.expm1(xp.minimum(input, 0.0)))


elu.vjp("input")(lambda xp, g, input, alpha: g * xp.where(input > 0, 1.0, alpha * xp.exp(xp.minimum(input, 0.0))))

elementwise_kernel(
    elu, "input > 0.f ? input : alpha * expm1f(input)", input="input > 0.f ? g : g * alpha * e_to(input)"
)

elu.samples(sample(apart(3, 5)), sample(apart(4), 0.7), sample((0, 2)))


@primitive(torch="nn.functional.softplus")
def softplus(xp: Namespace, input: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """log(1 + exp(beta * input)) / beta; input itself where beta * input exceeds threshold"""
    x = beta * input
    return xp.where(x > threshold, input, softplus_value(xp, x) / beta)


def softplus_value(xp: Namespace, x: Array) -> Array:
    """log(1 + e^x), computed without overflow and without losing small values."""
    return xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))


@softplus.vjp("input")
def _(xp: Namespace, g: Array, input: Array, beta: float, threshold: float) -> Array:
    x = beta * input
    return xp.where(x > threshold, g, g * sigmoid_value(xp, x))


elementwise_kernel(
    softplus,
    "float x = beta * input; x > threshold ? input : softplus(x) / beta",
    input="float x = beta * input; x > threshold ? g : g * sigmoid(x)",
)

softplus.samples(sample((3, 5)), sample((6,), 2.0, 1.0), sample((0, 2)))


def _mish_gradient(xp: Namespace, g: Array, input: Array) -> Array:
    t = xp.tanh(softplus_value(xp, input))
    return g * (t + input * (1.0 - t * t) * sigmoid_value(xp, input))


mish = unary(
    "mish",
    "input * tanh(softplus(input)) (arXiv 1908.08681)",
    lambda xp, input: input * xp.tanh(softplus_value(xp, input)),
    _mish_gradient,
    kernel=(
        "input * mish_gate(input)",
        "float t = mish_gate(input); g * (t + input * (1.f - t * t) * sigmoid(input))",
    ),
    torch="nn.functional.mish",
)

hardswish = unary(
    "hardswish",
    "input * min(max(input + 3, 0), 6) / 6 (arXiv 1905.02244)",
    lambda xp, input: input * xp.clip(input + 3.0, 0.0, 6.0) / 6.0,
    lambda xp, g, input: xp.where(input <= -3.0, 0.0, xp.where(input >= 3.0, g, g * (input / 3.0 + 0.5))),
    torch="nn.functional.hardswish",
    make=lambda *shape: Values(shape, -5.0, 5.0),
)


@primitive(torch=None)
def swiglu(xp: Namespace, input: Array) -> Array:
    """value * silu(gate) for input = [value, gate] along the last dim (arXiv 2002.05202)"""
    value, gate = halves(input, "swiglu")
    return value * gate * sigmoid_value(xp, gate)


@swiglu.vjp("input")
def _(xp: Namespace, g: Array, input: Array) -> Array:
    value, gate = halves(input, "swiglu")
    s = sigmoid_value(xp, gate)
    return xp.concatenate([g * gate * s, g * value * s * (1.0 + gate * (1.0 - s))], axis=-1)


gated_kernels(swiglu, "silu")

swiglu.samples(sample((2, 3, 8)), sample((5, 2)), sample((0, 4)))

swiglu.errors(
    ErrorSample(sample((2, 3)), ShapeError, "swiglu: expected an even last dim"),
    ErrorSample(sample(()), ShapeError, "swiglu: expected a tensor of at least 1 dim"),
)

swiglu.perf_samples(sample((3, 77, 2560)))

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@primitive(torch="nn.functional.hardtanh")
def hardtanh(xp: Namespace, input: Array, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    """input limited to [min_val, max_val]; the gradient passes where input lies inside, bounds excluded"""
    if min_val > max_val:
        raise ValueError(f"hardtanh: expected min_val of at most max_val, got {min_val} and {max_val}")
    return xp.clip(input, min_val, max_val)


hardtanh.vjp("input")(lambda xp, g, input, min_val, max_val: xp.where((input <= min_val) | (input >= max_val), 0.0, g))

elementwise_kernel(
    hardtanh,
    "smaller(larger(input, min_val), max_val)",
    when=lambda min_val, max_val: min_val <= max_val or "limits that are refused",
    input="input <= min_val || input >= max_val ? 0.f : g",
)

hardtanh.samples(sample((3, 5)), sample((4,), -0.5, 1.5), sample((0, 2)))

hardtanh.errors(ErrorSample(sample((2,), 1.0, -1.0), ValueError, "min_val of at most max_val, got 1.0 and -1.0"))


@primitive(torch="nn.functional.relu6", accepts_integers=True)
def relu6(xp: Namespace, input: Array) -> Array:
    """min(max(input, 0), 6); the gradient at 0 and 6 is zero (arXiv 1704.04861)"""
    return xp.clip(input, 0, 6)


relu6.vjp("input")(lambda xp, g, input: xp.where((input <= 0) | (input >= 6), 0.0, g))

elementwise_kernel(relu6, "smaller(larger(input, 0.f), 6.f)", input="input <= 0.f || input >= 6.f ? 0.f : g")

relu6.samples(sample(Values((4, 5), -3.0, 9.0, gap=0.1)), sample(apart(1)), sample((0, 2)))


@primitive(torch="nn.functional.hardsigmoid")
def hardsigmoid(xp: Namespace, input: Array) -> Array:
    """min(max(input + 3, 0), 6) / 6 (arXiv 1905.02244)"""
    return xp.clip(input + 3.0, 0.0, 6.0) / 6.0


hardsigmoid.vjp("input")(lambda xp, g, input: xp.where((input <= -3.0) | (input >= 3.0), 0.0, g / 6.0))

elementwise_kernel(
    hardsigmoid,
    "smaller(larger(input + 3.f, 0.f), 6.f) / 6.f",
    input="input <= -3.f || input >= 3.f ? 0.f : g / 6.f",
)

hardsigmoid.samples(sample(Values((4, 5), -5.0, 5.0)), sample((1,)), sample((0, 2)))


@primitive(torch="nn.functional.selu")
def selu(xp: Namespace, input: Array) -> Array:
    """1.0507 * input where it is positive, else 1.0507 * 1.67326 * (exp(input) - 1) (arXiv 1706.02515)"""
    below = _SELU_ALPHA * xp.expm1(xp.minimum(input, 0.0))
    return _SELU_SCALE * xp.where(input > 0, input, below)


selu.vjp("input")(
    lambda xp, g, input: g * _SELU_SCALE * xp.where(input > 0, 1.0, _SELU_ALPHA * xp.exp(xp.minimum(input, 0.0)))
)

elementwise_kernel(
    selu,
    f"{_SELU_SCALE}f * (input > 0.f ? input : {_SELU_ALPHA}f * expm1f(input))",
    input=f"g * {_SELU_SCALE}f * (input > 0.f ? 1.f : {_SELU_ALPHA}f * e_to(input))",
)

selu.samples(*of_one(apart))


@primitive(torch="nn.functional.celu")
def celu(xp: Namespace, input: Array, alpha: float = 1.0) -> Array:
    """input where it is positive, else alpha * (exp(input / alpha) - 1) (arXiv 1704.07483)"""
    if alpha == 0:
        raise ValueError("celu: expected an alpha that is not 0")
    return xp.where(input > 0, input, alpha * xp.expm1(xp.where(input > 0, 0.0, input) / alpha))


celu.vjp("input")(
    lambda xp, g, input, alpha: g * xp.where(input > 0, 1.0, xp.exp(xp.where(input > 0, 0.0, input) / alpha))
)

elementwise_kernel(
    celu,
    "input > 0.f ? input : alpha * expm1f(input / alpha)",
    when=lambda alpha: alpha != 0 or "an alpha that is refused",
    input="input > 0.f ? g : g * e_to(input / alpha)",
)

celu.samples(sample(apart(3, 5)), sample(apart(4), 0.7), sample((0, 2)))

celu.errors(ErrorSample(sample((2,), 0.0), ValueError, "celu: expected an alpha that is not 0"))


@primitive(torch="nn.functional.softsign")
def softsign(xp: Namespace, input: Array) -> Array:
    """input / (1 + |input|)"""
    return input / (1.0 + xp.abs(input))


softsign.vjp("input")(lambda xp, g, input: g / xp.square(1.0 + xp.abs(input)))

elementwise_kernel(
    softsign,
    "input / (1.f + fabsf(input))",
    input="float d = 1.f + fabsf(input); g / (d * d)",
)

softsign.samples(*of_one(apart))


@primitive(torch="nn.functional.logsigmoid")
def logsigmoid(xp: Namespace, input: Array) -> Array:
    """log(1 / (1 + exp(-input)))"""
    return -softplus_value(xp, -input)


logsigmoid.vjp("input")(lambda xp, g, input: g * sigmoid_value(xp, -input))

elementwise_kernel(logsigmoid, "-softplus(-input)", input="g * sigmoid(-input)")

logsigmoid.samples(*of_one())


@primitive(torch="nn.functional.prelu")
def prelu(xp: Namespace, input: Array, weight: Array) -> Array:
    """input where it is positive, else weight * input; a weight for all, or one a channel, dim 1 (arXiv 1502.01852)"""
    return xp.where(input > 0, input, _by_channel(weight, input.shape) * input)


def _by_channel(weight: Array, shape: Shape) -> Array:
    """`weight` so that it broadcasts to an input of `shape`. Raises ShapeError if it is neither one nor one a channel.

    As in PyTorch an input of one dim has one channel.
    """
    channels = shape[1] if len(shape) > 1 else 1
    if weight.ndim > 1 or weight.size not in (1, channels):
        raise ShapeError(
            f"prelu: expected a weight of one number, or of {channels} for the channels of an input of shape "
            f"{tuple(shape)}, got shape {tuple(weight.shape)}"
        )
    one = weight.size == 1 or len(shape) < 2
    return weight.reshape((1,) * len(shape) if one else (1, channels, *(1,) * (len(shape) - 2)))


@prelu.vjp("input")
def _(xp: Namespace, g: Array, input: Array, weight: Array) -> Array:
    return xp.where(input > 0, g, _by_channel(weight, input.shape) * g)


@prelu.vjp("weight")
def _(xp: Namespace, g: Array, input: Array, weight: Array) -> Array:
    each = xp.where(input > 0, 0.0, g * input)
    if weight.size == 1:
        return accurate_sum(xp.sum, each, tuple(range(each.ndim)), False).reshape(weight.shape)
    return accurate_sum(xp.sum, each, tuple(i for i in range(each.ndim) if i != 1), False)


def _fits(input: Array, weight: Array) -> str:
    """Says why the kernels cannot take these; "" if they can."""
    fits = weight.ndim < 2 and weight.size in (1, input.shape[1] if input.ndim > 1 else 1)
    return floating(input, weight) if fits else "a weight that is refused"


@prelu.cuda("generated", when=_fits)
def _(k: Launcher, input: Array, weight: Array) -> Array:
    operands = {"input": input, "weight": _by_channel(weight, input.shape)}
    dtype = promote_floats([input.dtype, *([weight.dtype] if weight.ndim else [])])
    return k.elementwise(("input > 0.f ? input : weight * input",), operands, (dtype,))[0]


@prelu.cuda_vjp("generated", "input", when=_fits)
def _(k: Launcher, g: Array, input: Array, weight: Array, targets: GradTargets) -> Array:
    operands = {"g": g, "input": input, "weight": _by_channel(weight, input.shape)}
    return broadcast_grad(k, "input > 0.f ? g : weight * g", operands, input.shape, targets["input"])


@prelu.cuda_vjp("generated", "weight", when=_fits)
def _(k: Launcher, g: Array, input: Array, weight: Array) -> Array:
    shape = _by_channel(weight, input.shape).shape
    return broadcast_grad(k, "input > 0.f ? 0.f : g * input", {"g": g, "input": input}, shape).reshape(weight.shape)


prelu.samples(
    sample(apart(3, 4), (1,)),
    sample(apart(2, 3, 2, 2), (3,)),
    sample(apart(5), ()),
    sample((0, 2), (2,)),
    sample(apart(2, 3), (3,)),
)

prelu.perf_samples(sample(apart(3, 5, 60, 61), (5,)), sample(apart(2, 2, 9001), (2,)))

prelu.errors(
    ErrorSample(sample((2, 3), (2,)), ShapeError, r"or of 3 for the channels .* \(2, 3\), got shape \(2,\)"),
    ErrorSample(sample((2, 3), (1, 3)), ShapeError, "expected a weight of one number"),
)
