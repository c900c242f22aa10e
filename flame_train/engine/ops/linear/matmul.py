"""Matrix products. On CUDA they go through cuBLASLt."""

from __future__ import annotations

import math
from typing import Any

from ....errors import ShapeError
from ...autograd.grad_target import GradTarget, GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common import conditions


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


@primitive(torch="matmul", accepts_integers=True)
def matmul(xp: Namespace, input: Array, other: Array) -> Array:
    """input @ other over the last two dims, the others broadcast; a 1-D operand is a vector"""
    if 0 in (input.ndim, other.ndim):
        raise ShapeError(f"matmul: expected at least 1 dim each, got {tuple(input.shape)} @ {tuple(other.shape)}")
    inner = other.shape[-2] if other.ndim > 1 else other.shape[0]
    if input.shape[-1] != inner:
        raise ShapeError(
            f"matmul: {tuple(input.shape)} @ {tuple(other.shape)}: inner sizes {input.shape[-1]} and {inner} differ"
        )
    return xp.matmul(input, other)


@matmul.vjp("input")
def _(xp: Namespace, g: Array, input: Array, other: Array) -> Array:
    if other.ndim == 1:
        return xp.expand_dims(g, -1) * other
    if input.ndim == 1:
        return xp.matmul(g[..., None, :], _t(other))[..., 0, :]
    return xp.matmul(g, _t(other))


@matmul.vjp("other")
def _(xp: Namespace, g: Array, input: Array, other: Array) -> Array:
    if input.ndim == 1:
        return xp.expand_dims(input, -1) * g[..., None, :] if other.ndim > 1 else g * input
    if other.ndim == 1:
        return xp.matmul(_t(input), g[..., None])[..., 0]
    return xp.matmul(_t(input), g)


matmul.samples(
    sample((3, 4), (4, 2)),
    sample((2, 3, 4), (4, 5)),
    sample((2, 1, 3, 4), (3, 4, 2)),
    sample((4,), (4, 2)),
    sample((2, 3, 4), (4,)),
    sample((4,), (4,)),
    sample((0, 4), (4, 2)),
    sample((3, 0), (0, 2)),
    sample((2, 3, 0), (0, 4)),
    sample((2, 3, 0), (2, 0, 4)),
)

matmul.errors(
    ErrorSample(sample((2, 3), (4, 2)), ShapeError, "inner sizes 3 and 4 differ"),
    ErrorSample(sample((), (4, 2)), ShapeError, "at least 1 dim each"),
)


@primitive(torch="nn.functional.linear", accepts_integers=True)
def linear(xp: Namespace, input: Array, weight: Array, bias: Array | None = None) -> Array:
    """input @ weight^T + bias, over the last dim"""
    check_linear(input, weight)
    y = rows_product(xp, input, weight.T)
    return y if bias is None else y + bias


def rows_product(xp: Namespace, x: Array, matrix: Array) -> Array:
    """x @ matrix with all leading dims of x as rows of one product; NumPy would make a product for each of them."""
    return xp.matmul(_rows(x), matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_linear(input: Array, weight: Array) -> None:
    """Raises ShapeError unless weight is a matrix (out, in) and input is (..., in)."""
    if weight.ndim != 2 or not input.ndim:
        raise ShapeError(
            f"linear: expected input (..., in) and weight (out, in), got {tuple(input.shape)}, {tuple(weight.shape)}"
        )
    if input.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            f"linear: input has last dim {input.shape[-1]} but weight is {tuple(weight.shape)}, "
            f"which takes {weight.shape[-1]}"
        )


def check_residual(op: str, input: Array | Tensor, weight: Array | Tensor, residual: Array | Tensor | None) -> None:
    """Raises ShapeError unless the residual, if there is one, has the shape of linear(input, weight)."""
    if not residual_fits(input, weight, residual):
        assert residual is not None
        raise ShapeError(f"{op}: expected a residual of the result's shape, got {tuple(residual.shape)}")


def residual_fits(input: Array | Tensor, weight: Array | Tensor, residual: Array | Tensor | None) -> bool:
    """Tells whether `check_residual` accepts these."""
    return residual is None or (weight.ndim > 0 and tuple(residual.shape) == (*input.shape[:-1], weight.shape[0]))


linear.vjp("input")(lambda xp, g, weight: rows_product(xp, g, weight))

linear.vjp("weight")(lambda xp, g, input: xp.matmul(_rows(g).T, _rows(input)))


@linear.vjp("bias")
def _(xp: Namespace, g: Array) -> Array:
    return g  # summed down to the bias's shape in the backward pass, like every gradient


linear.samples(
    sample((3, 4), (5, 4), (5,)),
    sample((2, 3, 4), (5, 4)),
    sample((4,), (1, 4), (1,)),
    sample((0, 4), (5, 4), (5,)),
    sample((2, 3, 0), (5, 0), (5,)),
    sample((2, 3, 4), (0, 4), (0,)),
)

linear.errors(
    ErrorSample(sample((2, 3), (4, 5)), ShapeError, r"last dim 3 but weight is \(4, 5\)"),
    ErrorSample(sample((2, 3), (3,)), ShapeError, r"weight \(out, in\), got \(2, 3\), \(3,\)"),
)


def _products(input: Array, other: Array) -> str:
    if input.ndim < 2 or other.ndim < 2:
        return "a vector operand"
    if input.shape[-1] != other.shape[-2]:
        return "arguments that are refused"
    return conditions.same(conditions.ANY_FLOAT, input, other)


@matmul.cuda("cublaslt", when=_products)
def _(k: Launcher, input: Array, other: Array) -> Array:
    return k.matmul(input, other)


def linear_condition(input: Array, weight: Array, bias: Array | None) -> str:
    """Says why a linear layer cannot go through cuBLASLt; "" if it can."""
    if input.ndim < 2 or 0 in weight.shape:
        return "a vector operand, or nothing to multiply with"
    return conditions.same(conditions.ANY_FLOAT, input, weight, bias)


def product_to(k: Launcher, target: GradTarget, a: Array, b: Array) -> Array:
    """Returns a @ b as the gradient at `target`: added to what has arrived there, in that dtype."""
    dtype = None if target.addend is None else target.addend.dtype
    return k.matmul(a, b, out_dtype=dtype, **product_target(target))


def product_target(target: GradTarget) -> dict[str, Any]:
    """The arguments `out` and `plus` of a product that is a gradient: where it goes, and what it is added to."""
    buffer = target.buffer
    if target.addend is None and buffer is not None and not buffer.flags.c_contiguous:
        buffer = None
    return {"out": buffer, "plus": target.addend}


def _matrices(input: Array, other: Array) -> str:
    return _products(input, other) or ("" if input.ndim == other.ndim == 2 else "batches, which may be broadcast")


@matmul.cuda_vjp("cublaslt, in place", "input", when=_matrices)
def _(k: Launcher, g: Array, other: Array, targets: GradTargets) -> Array:
    return product_to(k, targets["input"], g, _t(other))


@matmul.cuda_vjp("cublaslt, in place", "other", when=_matrices)
def _(k: Launcher, g: Array, input: Array, targets: GradTargets) -> Array:
    return product_to(k, targets["other"], _t(input), g)


@matmul.cuda_vjp("cublaslt", "input", when=_products)
def _(k: Launcher, g: Array, other: Array) -> Array:
    return k.matmul(g, _t(other))


@matmul.cuda_vjp("cublaslt", "other", when=_products)
def _(k: Launcher, g: Array, input: Array) -> Array:
    return k.matmul(_t(input), g)


@linear.cuda("cublaslt", when=linear_condition)
def _(k: Launcher, input: Array, weight: Array, bias: Array | None) -> Array:
    check_linear(input, weight)
    return k.matmul(input, weight.T, bias=bias)


@composite()
def linear_add(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """linear(input, weight, bias) + residual, of the result's shape"""
    check_linear(input, weight)
    check_residual("linear_add", input, weight, residual)
    return linear(input, weight, bias) + residual


linear_add.samples(sample((2, 3, 4), (5, 4), (5,), (2, 3, 5)), sample((3, 4), (5, 4), None, (3, 5)))

linear_add.errors(
    ErrorSample(sample((2, 3), (3,), (3,), (2, 3)), ShapeError, r"weight \(out, in\)"),
    ErrorSample(sample((2, 3), (4, 3), (4,), (4,)), ShapeError, "a residual of the result's shape"),
)


def added_condition(input: Array, weight: Array, bias: Array | None, residual: Array) -> str:
    """Answers as `linear_condition`, for a layer with a residual."""
    if not residual_fits(input, weight, residual):
        return "arguments that are refused"
    return linear_condition(input, weight, bias) or conditions.same(conditions.ANY_FLOAT, input, residual)


@linear_add.cuda("cublaslt", when=added_condition)
def _(k: Launcher, input: Array, weight: Array, bias: Array | None, residual: Array) -> Array:
    check_linear(input, weight)
    return k.matmul(input, weight.T, bias=bias, plus=residual)


for _op, _when in ((linear, linear_condition), (linear_add, added_condition)):

    @_op.cuda_vjp("cublaslt", "input", when=_when)
    def _(k: Launcher, g: Array, weight: Array, targets: GradTargets) -> Array:
        return product_to(k, targets["input"], g, weight)

    @_op.cuda_vjp("cublaslt", "weight", when=_when)
    def _(k: Launcher, g: Array, input: Array, targets: GradTargets) -> Array:
        return product_to(k, targets["weight"], g.reshape(-1, g.shape[-1]).T, input.reshape(-1, input.shape[-1]))


@linear_add.cuda_vjp("cublaslt", "bias", when=added_condition)
def _(k: Launcher, g: Array) -> Array:
    return g


@linear_add.cuda_vjp("cublaslt", "residual", when=added_condition)
def _(k: Launcher, g: Array) -> Array:
    return g


matmul.perf_samples(sample((4, 8, 96, 64), (4, 8, 64, 80)), sample((300, 200), (200, 100)))

linear_add.perf_samples(
    sample((2, 77, 640), (1280, 640), (1280,), (2, 77, 1280)), sample((333, 250), (130, 250), None, (333, 130))
)

linear.perf_samples(sample((2, 77, 640), (1280, 640), (1280,)), sample((333, 250), (130, 250)))
