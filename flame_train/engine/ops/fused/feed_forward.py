"""A transformer's feed-forward network: two products, with the GELU between them in the epilogue of the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....errors import ShapeError
from ...arguments import Arguments
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.libraries.cublaslt import Gelu
from ...backend.cuda.tuning import tuning_of
from ...dtype import Array, DType, int8
from ...op import ErrorSample, composite, sample
from ...tensors.tensor import Tensor
from ..common import conditions
from ..linear.matmul import check_linear, linear, product_to
from ..linear.scaled import fits, products, scaled_linear, scaled_product_to, storage
from ..linear.scaled_storage import decode, encode, stored
from ..pointwise.activations import gelu


@composite(aux=("hidden",))
def feed_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None = None
) -> Tensor:
    """linear(gelu(linear(input, weight1, bias1), approximate="tanh"), weight2, bias2), as in DiTs (arXiv 2212.09748)

    Its kernels are for frozen weights; where these require grad, the ops it consists of run one by one.

    Args:
        weight1: (hidden, in).
        bias1: (hidden,), or None.
        weight2: (out, hidden).
        bias2: (out,), or None.

    Returns:
        (..., out).
    """
    return linear(gelu(linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


feed_forward.samples(sample((2, 3, 4), (6, 4), (6,), (5, 6), (5,)), sample((3, 4), (6, 4), None, (4, 6)))

feed_forward.errors(
    ErrorSample(sample((2, 3), (6, 4), None, (3, 6)), ShapeError, r"last dim 3 but weight is \(6, 4\)"),
    ErrorSample(sample((2, 4), (6, 4), None, (3, 5)), ShapeError, r"last dim 6 but weight is \(3, 5\)"),
)


def _in_epilogues(input: Array, weight1: Array, bias1: Array | None, weight2: Array, bias2: Array | None) -> str:
    return too_few(input, weight1) or conditions.same(conditions.LOW, input, weight1, bias1, weight2, bias2)


def too_few(input: Array, weight1: Array) -> str:
    """Says why the GELU is not computed in cuBLASLt's epilogues; "" if it is."""
    if input.ndim < 2 or input.size == 0 or weight1.ndim != 2 or 0 in weight1.shape:
        return "a vector operand, or none"
    if weight1.shape[0] % 8:
        return f"{weight1.shape[0]} hidden values a row: rows of 16 bytes begin at odd places"
    between, least = input.size // input.shape[-1] * weight1.shape[0], tuning_of(input).gelu_epilogue_elements
    if between < least:
        return f"{between} values between the products: expected at least {least}"
    return ""


@feed_forward.cuda("cublaslt", when=_in_epilogues)
def _(
    k: Launcher, input: Array, weight1: Array, bias1: Array | None, weight2: Array, bias2: Array | None
) -> tuple[Array, Array]:
    return forward(k, input, weight1, bias1, weight2, bias2)


def forward(
    k: Launcher, input: Array, weight1: Array, bias1: Array | None, weight2: Array, bias2: Array | None
) -> tuple[Array, Array]:
    """Returns the result (..., out), and the hidden values before the GELU, (rows, hidden).

    Args:
        input, weight1, bias1, weight2, bias2: as in `feed_forward`.
    """
    check_linear(input, weight1)
    rows = k.mergeable_rows(input).reshape(-1, input.shape[-1])
    hidden = k.empty((len(rows), len(weight1)), input.dtype)
    check_linear(hidden, weight2)
    made = k.matmul(rows, weight1.T, bias=bias1, gelu=Gelu(hidden))
    return k.matmul(made, weight2.T, bias=bias2).reshape(*input.shape[:-1], len(weight2)), hidden


@feed_forward.cuda_vjp("cublaslt", "input", when=_in_epilogues)
def _(k: Launcher, g: Array, weight1: Array, weight2: Array, hidden: Array, targets: GradTargets) -> Array:
    return backward(k, g, weight1, weight2, hidden, targets)


def backward(k: Launcher, g: Array, weight1: Array, weight2: Array, hidden: Array, targets: GradTargets) -> Array:
    """Returns the input's gradient (..., in); `hidden` as `forward` returned it.

    Args:
        weight1, weight2: as in `feed_forward`.
        hidden: (rows, hidden).
    """
    carried = k.matmul(g, weight2, gelu=Gelu(hidden, derivative=True))
    return product_to(k, targets["input"], carried, weight1)


feed_forward.perf_samples(
    sample((2, 77, 640), (2560, 640), (2560,), (640, 2560), (640,)),
    sample((2, 1030, 32), (8192, 32), (8192,), (24, 8192), (24,)),
)


@dataclass(frozen=True, slots=True)
class ScaledWeights(Arguments):
    """Both layers' weights as data (out, in), e4m3 in uint8 or int8, scales (out,), and columns rotated together."""

    data1: Array
    scales1: Array
    data2: Array
    scales2: Array
    rotated: int

    def decoded(self, k: Launcher, dtype: DType) -> tuple[Array, Array]:
        """Returns both weights in `dtype`."""
        first = decode(k, self.data1, self.scales1, dtype, self.rotated)
        return first, decode(k, self.data2, self.scales2, dtype, self.rotated)


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
    rotated: int = 0,
) -> Tensor:
    """scaled_linear(gelu(scaled_linear(input, data1, scales1, bias1), approximate="tanh"), data2, scales2, bias2)

    With `dynamic` both take rounded rows, see `scaled_linear`.

    Args:
        data1: e4m3 in uint8, or int8 (hidden, in).
        scales1: uint32 (hidden,).
        bias1: (hidden,), or None.
        data2: the same (out, hidden).
        scales2: uint32 (out,).
        bias2: (out,), or None.
        dynamic: whether rows are rounded, too.
        rotated: columns of both that are rotated together; 0: none.

    Returns:
        (..., out).
    """
    hidden = scaled_linear(input, data1, scales1, bias1, dynamic=dynamic, rotated=rotated)
    return scaled_linear(gelu(hidden, approximate="tanh"), data2, scales2, bias2, dynamic=dynamic, rotated=rotated)


scaled_feed_forward.non_differentiable("data1", "scales1", "data2", "scales2")

scaled_feed_forward.samples(
    lambda: (
        sample((2, 3, 4), *stored(6, 4), (6,), *stored(5, 6), (5,)),
        sample((3, 4), *stored(6, 4), None, *stored(4, 6)),
        sample((3, 4), *stored(6, 4, dtype=int8), (6,), *stored(4, 6, dtype=int8)),
        sample((3, 4), *stored(8, 4, dtype=int8), (8,), *stored(4, 8, dtype=int8), rotated=4),
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
        *(
            sample((2, 77, 640), *first, (2560,), *second, (640,), dynamic=True, rotated=group)
            for first, second in ((stored(2560, 640, dtype=int8), stored(640, 2560, dtype=int8)),)
            for group in (0, 64)
        ),
    )
)


def _misfit(input: Array, weights: ScaledWeights, bias1: Array | None, bias2: Array | None) -> str:
    group = weights.rotated
    first = fits(input, weights.data1, weights.scales1, rotated=group)
    if not first or not fits(weights.data1.T, weights.data2, weights.scales2, rotated=group):
        return "arguments that are refused"
    return conditions.same(conditions.LOW, input, bias1, bias2)


def _storage(input: Array, data1: Array, dynamic: bool) -> str:
    return storage(input, data1, dynamic) or too_few(input, data1)


def _products(input: Array, data1: Array, data2: Array, dynamic: bool) -> str:
    if data1.dtype != data2.dtype:
        return "layers of several formats"
    return products(input, data1, dynamic) or products(input, data2, dynamic)


@scaled_feed_forward.cuda("cublaslt", when=(_misfit, _storage))
def _(
    k: Launcher, input: Array, weights: ScaledWeights, bias1: Array | None, bias2: Array | None
) -> tuple[Array, Array]:
    first, second = weights.decoded(k, input.dtype)
    return forward(k, input, first, bias1, second, bias2)


@scaled_feed_forward.cuda_vjp("cublaslt", "input", when=(_misfit, _storage))
def _(k: Launcher, g: Array, weights: ScaledWeights, hidden: Array, targets: GradTargets) -> Array:
    return backward(k, g, *weights.decoded(k, g.dtype), hidden, targets)


@scaled_feed_forward.cuda("scaled", when=(_misfit, _products))
def _(
    k: Launcher, input: Array, weights: ScaledWeights, bias1: Array | None, bias2: Array | None
) -> tuple[Array, Array]:
    hidden = k.empty((*input.shape[:-1], len(weights.data1)), input.dtype)
    rounded = encode(k, input, weights.data1.dtype, rotated=weights.rotated)
    k.scaled_product(rounded, (k.contiguous(weights.data1), weights.scales1), out=hidden, bias=bias1)
    out = k.empty((*input.shape[:-1], len(weights.data2)), input.dtype)
    rounded = encode(k, hidden, weights.data2.dtype, value="gelu_tanh(x)", rotated=weights.rotated)
    k.scaled_product(rounded, (k.contiguous(weights.data2), weights.scales2), out=out, bias=bias2)
    return out, hidden


@scaled_feed_forward.cuda_vjp("scaled", "input", when=(_misfit, _products))
def _(k: Launcher, g: Array, weights: ScaledWeights, hidden: Array, targets: GradTargets) -> Array:
    first, second = (weights.data1, weights.scales1), (weights.data2, weights.scales2)
    grad = scaled_product_to(k, g, *second, ALLOCATE, rotated=weights.rotated)
    value = "x * gelu_tanh_derivative(other)"
    return scaled_product_to(k, grad, *first, targets["input"], value, hidden, weights.rotated)
