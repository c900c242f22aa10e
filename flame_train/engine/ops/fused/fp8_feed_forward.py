"""A transformer's feed-forward network stored in 8 bits: see `fp8.py` and `feed_forward.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...grad_target import FRESH, GradTargets
from ...op import ErrorSample, composite, sample
from ...tensor import Tensor
from ..common import conditions
from ..linear.fp8 import decode, encode, fits, fp8_linear, fp8_product_to, products, storage, stored
from ..pointwise.activations import gelu
from . import feed_forward


@composite(aux=("hidden",))
def fp8_feed_forward(
    input: Tensor,
    codes1: Tensor,
    scales1: Tensor,
    bias1: Tensor | None,
    codes2: Tensor,
    scales2: Tensor,
    bias2: Tensor | None = None,
    dynamic: bool = False,
) -> Tensor:
    """fp8_linear(gelu(fp8_linear(input, codes1, scales1, bias1), approximate="tanh"), codes2, scales2, bias2)

    With `dynamic` both take rounded rows, see `fp8_linear`.
    """
    hidden = fp8_linear(input, codes1, scales1, bias1, dynamic=dynamic)
    return fp8_linear(gelu(hidden, approximate="tanh"), codes2, scales2, bias2, dynamic=dynamic)


fp8_feed_forward.non_differentiable("codes1", "scales1", "codes2", "scales2")


fp8_feed_forward.samples(
    sample((2, 3, 4), *stored(6, 4), (6,), *stored(5, 6), (5,)), sample((3, 4), *stored(6, 4), None, *stored(4, 6))
)


def _fp8_feed_forward_errors() -> Iterator[ErrorSample]:
    bad = sample((2, 3), *stored(6, 4), None, *stored(3, 6))
    yield ErrorSample(bad, ShapeError, r"last dim 3 but weight is \(6, 4\)")
    bad = sample((2, 4), *stored(6, 4), None, *stored(3, 5))
    yield ErrorSample(bad, ShapeError, r"last dim 6 but weight is \(3, 5\)")


fp8_feed_forward.errors(*_fp8_feed_forward_errors())


fp8_feed_forward.perf_samples(
    sample((32, 1030, 32), *stored(512, 32), (512,), *stored(48, 512), (48,)),
    sample((2, 77, 640), *stored(2560, 640), (2560,), *stored(640, 2560), (640,), dynamic=True),
)


def _misfit(
    input: Array,
    codes1: Array,
    scales1: Array,
    bias1: Array | None,
    codes2: Array,
    scales2: Array,
    bias2: Array | None,
) -> str:
    if not fits(input, codes1, scales1) or not fits(codes1.T, codes2, scales2):
        return "arguments that are refused"
    return conditions.same(conditions.LOW, input, bias1, bias2)


def _storage(input: Array, codes1: Array, dynamic: bool) -> str:
    return storage(input, codes1, dynamic) or feed_forward.too_few(input, codes1)


def _products(input: Array, codes1: Array, codes2: Array, dynamic: bool) -> str:
    return products(input, codes1, dynamic) or products(input, codes2, dynamic)


@fp8_feed_forward.cuda("cublaslt", when=(_misfit, _storage))
def _(
    k: Launcher,
    input: Array,
    codes1: Array,
    scales1: Array,
    bias1: Array | None,
    codes2: Array,
    scales2: Array,
    bias2: Array | None,
) -> tuple[Array, Array]:
    first, second = decode(k, codes1, scales1, input.dtype), decode(k, codes2, scales2, input.dtype)
    return feed_forward.forward(k, input, first, bias1, second, bias2)


@fp8_feed_forward.cuda_vjp("cublaslt", "input", when=(_misfit, _storage))
def _(
    k: Launcher,
    g: Array,
    codes1: Array,
    scales1: Array,
    codes2: Array,
    scales2: Array,
    hidden: Array,
    targets: GradTargets,
) -> Array:
    first, second = decode(k, codes1, scales1, g.dtype), decode(k, codes2, scales2, g.dtype)
    return feed_forward.backward(k, g, first, second, hidden, targets)


@fp8_feed_forward.cuda("fp8", when=(_misfit, _products))
def _(
    k: Launcher,
    input: Array,
    codes1: Array,
    scales1: Array,
    bias1: Array | None,
    codes2: Array,
    scales2: Array,
    bias2: Array | None,
) -> tuple[Array, Array]:
    hidden = k.empty((*input.shape[:-1], len(codes1)), input.dtype)
    k.scaled_product(*encode(k, input), k.contiguous(codes1), scales1, out=hidden, bias=bias1)
    out = k.empty((*input.shape[:-1], len(codes2)), input.dtype)
    rounded = encode(k, hidden, value="gelu_tanh(x)")
    k.scaled_product(*rounded, k.contiguous(codes2), scales2, out=out, bias=bias2)
    return out, hidden


@fp8_feed_forward.cuda_vjp("fp8", "input", when=(_misfit, _products))
def _(
    k: Launcher,
    g: Array,
    codes1: Array,
    scales1: Array,
    codes2: Array,
    scales2: Array,
    hidden: Array,
    targets: GradTargets,
) -> Array:
    carried = fp8_product_to(k, g, codes2, scales2, FRESH)
    value = "x * gelu_tanh_derivative(beside)"
    return fp8_product_to(k, carried, codes1, scales1, targets["input"], value=value, beside=hidden)
