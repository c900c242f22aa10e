"""A transformer's feed-forward network: two products, with the GELU between them in the epilogue of the first."""

from __future__ import annotations

from ....errors import ShapeError
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.libraries.cublaslt import Gelu
from ...backend.cuda.tuning import tuning_of
from ...dtype import Array
from ...op import ErrorSample, composite, sample
from ...tensors.tensor import Tensor
from ..common import conditions
from ..linear.matmul import check_linear, linear, product_to
from ..pointwise.activations import gelu


@composite(aux=("hidden",))
def feed_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None = None
) -> Tensor:
    """linear(gelu(linear(input, weight1, bias1), approximate="tanh"), weight2, bias2), as in DiTs (arXiv 2212.09748)

    Its kernels are for frozen weights; where these require grad, the ops it consists of run one by one.

    Args:
        input: (..., in).
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
    """Why the GELU is not computed in cuBLASLt's epilogues; "" if it is."""
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
    """The result, and the hidden values before the GELU, (rows, hidden).

    Args:
        input, weight1, bias1, weight2, bias2: as in `feed_forward`.

    Returns:
        (..., out) and (rows, hidden).
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
    """The input's gradient; `hidden` as `forward` returned it.

    Args:
        weight1, weight2: as in `feed_forward`.
        g: (..., out).
        hidden: (rows, hidden).
        targets: where the wanted gradients go.

    Returns:
        (..., in).
    """
    carried = k.matmul(g, weight2, gelu=Gelu(hidden, derivative=True))
    return product_to(k, targets["input"], carried, weight1)


feed_forward.perf_samples(
    sample((2, 77, 640), (2560, 640), (2560,), (640, 2560), (640,)),
    sample((2, 1030, 32), (8192, 32), (8192,), (24, 8192), (24,)),
)
