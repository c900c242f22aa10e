"""A transformer's feed-forward network stored in 8 bits: see `scaled.py` and `feed_forward.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....errors import ShapeError
from ...arguments import Arguments
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, int8
from ...op import ErrorSample, composite, sample
from ...tensors.tensor import Tensor
from ..common import conditions
from ..linear.scaled import fits, products, scaled_linear, scaled_product_to, storage
from ..linear.scaled_storage import decode, encode, stored
from ..pointwise.activations import gelu
from . import feed_forward


@dataclass(frozen=True, slots=True)
class ScaledWeights(Arguments):
    """Both layers' weights as data (out, in), e4m3 in uint8 or int8, and scales (out,)."""

    data1: Array
    scales1: Array
    data2: Array
    scales2: Array

    def decoded(self, k: Launcher, dtype: DType) -> tuple[Array, Array]:
        """Both weights in `dtype`."""
        return decode(k, self.data1, self.scales1, dtype), decode(k, self.data2, self.scales2, dtype)


@composite(aux=("hidden",))
def scaled_feed_forward(
    input: Tensor,
    data1: Tensor,
    scales1: Tensor,
    bias1: Tensor | None,
    data2: Tensor,
    scales2: Tensor,
    bias2: Tensor | None = None,
    dynamic: bool = False,
) -> Tensor:
    """scaled_linear(gelu(scaled_linear(input, data1, scales1, bias1), approximate="tanh"), data2, scales2, bias2)

    With `dynamic` both take rounded rows, see `scaled_linear`.

    Args:
        input: (..., in).
        data1: e4m3 in uint8, or int8 (hidden, in).
        scales1: uint32 (hidden,).
        bias1: (hidden,), or None.
        data2: the same (out, hidden).
        scales2: uint32 (out,).
        bias2: (out,), or None.
        dynamic: whether rows are rounded, too.

    Returns:
        (..., out).
    """
    hidden = scaled_linear(input, data1, scales1, bias1, dynamic=dynamic)
    return scaled_linear(gelu(hidden, approximate="tanh"), data2, scales2, bias2, dynamic=dynamic)


scaled_feed_forward.non_differentiable("data1", "scales1", "data2", "scales2")


scaled_feed_forward.samples(
    lambda: (
        sample((2, 3, 4), *stored(6, 4), (6,), *stored(5, 6), (5,)),
        sample((3, 4), *stored(6, 4), None, *stored(4, 6)),
        sample((3, 4), *stored(6, 4, dtype=int8), (6,), *stored(4, 6, dtype=int8)),
    )
)


def _scaled_feed_forward_errors() -> Iterator[ErrorSample]:
    bad = sample((2, 3), *stored(6, 4), None, *stored(3, 6))
    yield ErrorSample(bad, ShapeError, r"last dim 3 but weight is \(6, 4\)")
    bad = sample((2, 4), *stored(6, 4), None, *stored(3, 5))
    yield ErrorSample(bad, ShapeError, r"last dim 6 but weight is \(3, 5\)")


scaled_feed_forward.errors(_scaled_feed_forward_errors)


scaled_feed_forward.perf_samples(
    lambda: (
        sample((32, 1030, 32), *stored(512, 32), (512,), *stored(48, 512), (48,)),
        sample((2, 77, 640), *stored(2560, 640), (2560,), *stored(640, 2560), (640,), dynamic=True),
        sample(
            (2, 77, 640), *stored(2560, 640, dtype=int8), (2560,), *stored(640, 2560, dtype=int8), (640,), dynamic=True
        ),
    )
)


def _misfit(input: Array, weights: ScaledWeights, bias1: Array | None, bias2: Array | None) -> str:
    if not fits(input, weights.data1, weights.scales1) or not fits(weights.data1.T, weights.data2, weights.scales2):
        return "arguments that are refused"
    return conditions.same(conditions.LOW, input, bias1, bias2)


def _storage(input: Array, data1: Array, dynamic: bool) -> str:
    return storage(input, data1, dynamic) or feed_forward.too_few(input, data1)


def _products(input: Array, data1: Array, data2: Array, dynamic: bool) -> str:
    if data1.dtype != data2.dtype:
        return "layers of several formats"
    return products(input, data1, dynamic) or products(input, data2, dynamic)


@scaled_feed_forward.cuda("cublaslt", when=(_misfit, _storage))
def _(
    k: Launcher, input: Array, weights: ScaledWeights, bias1: Array | None, bias2: Array | None
) -> tuple[Array, Array]:
    first, second = weights.decoded(k, input.dtype)
    return feed_forward.forward(k, input, first, bias1, second, bias2)


@scaled_feed_forward.cuda_vjp("cublaslt", "input", when=(_misfit, _storage))
def _(k: Launcher, g: Array, weights: ScaledWeights, hidden: Array, targets: GradTargets) -> Array:
    return feed_forward.backward(k, g, *weights.decoded(k, g.dtype), hidden, targets)


@scaled_feed_forward.cuda("scaled", when=(_misfit, _products))
def _(
    k: Launcher, input: Array, weights: ScaledWeights, bias1: Array | None, bias2: Array | None
) -> tuple[Array, Array]:
    hidden = k.empty((*input.shape[:-1], len(weights.data1)), input.dtype)
    k.scaled_product(
        encode(k, input, weights.data1.dtype), (k.contiguous(weights.data1), weights.scales1), out=hidden, bias=bias1
    )
    out = k.empty((*input.shape[:-1], len(weights.data2)), input.dtype)
    rounded = encode(k, hidden, weights.data2.dtype, value="gelu_tanh(x)")
    k.scaled_product(rounded, (k.contiguous(weights.data2), weights.scales2), out=out, bias=bias2)
    return out, hidden


@scaled_feed_forward.cuda_vjp("scaled", "input", when=(_misfit, _products))
def _(k: Launcher, g: Array, weights: ScaledWeights, hidden: Array, targets: GradTargets) -> Array:
    grad = scaled_product_to(k, g, weights.data2, weights.scales2, ALLOCATE)
    value = "x * gelu_tanh_derivative(other)"
    return scaled_product_to(k, grad, weights.data1, weights.scales1, targets["input"], value=value, other=hidden)
