"""Layers with a low-rank update: W x + scale * up (down x) (LoRA, arXiv 2106.09685).

The factors have the activations' dtype. Their gradients are fp32 where they are working copies of fp32 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....errors import ShapeError
from ...arguments import Arguments
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common import conditions
from ..conv.conv import conv2d
from ..conv.geometry import Pair
from .matmul import check_linear, check_residual, linear_condition, product_target, rows_product
from .skinny_gemm import SkinnyOperands, factor_gradients, listed, side_by_side


@dataclass(frozen=True, slots=True)
class LowRank(Arguments):
    """A layer's update: down (rank, in), up (out, rank) and the scale of their product."""

    down: Array
    up: Array
    scale: float


@dataclass(frozen=True, slots=True)
class LowRanks(Arguments):
    """The updates of n layers, of one scale."""

    downs: Sequence[Array]
    ups: Sequence[Array]
    scale: float


@dataclass(frozen=True, slots=True)
class AppliedLowRanks(LowRanks):
    """The updates, and the low-rank activations (rows, n rank) that they made of the input."""

    lora_hidden: Array


@primitive(aux=("lora_hidden",))
def lora_linear(
    xp: Namespace,
    input: Array,
    weight: Array,
    bias: Array | None,
    down: Array,
    up: Array,
    scale: float,
    residual: Array | None = None,
) -> tuple[Array, Array]:
    """linear(input, weight, bias) + (scale * input @ down^T) @ up^T, and the residual, of the same shape, if given

    Returns:
        (..., out), and the low-rank activations (..., rank).
    """
    check_linear(input, weight)
    check_factors("lora_linear", weight, down, up)
    check_residual("lora_linear", input, weight, residual)
    lora_hidden = rows_product(xp, input, down.T) * scale
    y = rows_product(xp, input, weight.T)
    for term in (bias, residual):
        y = y if term is None else y + term
    return y + rows_product(xp, lora_hidden, up.T), lora_hidden


def check_factors(op: str, weight: Array, down: Array, up: Array) -> None:
    """Raises ShapeError unless down (rank, in) and up (out, rank) are of one rank and go with weight (out, in)."""
    if not factors_fit(weight, down, up):
        out, width = weight.shape
        raise ShapeError(
            f"{op}: expected down (rank, {width}) and up ({out}, rank), got {tuple(down.shape)} and {tuple(up.shape)}"
        )


def factors_fit(weight: Array, down: Array, up: Array) -> bool:
    """Tells whether `check_factors` accepts these."""
    return down.ndim == up.ndim == 2 and (*up.shape, *down.shape) == (
        weight.shape[0],
        down.shape[0],
        down.shape[0],
        weight.shape[1],
    )


@lora_linear.vjp("input", "down", "up")
def _(
    xp: Namespace, g: Array, input: Array, weight: Array, lora: LowRank, lora_hidden: Array, needs: frozenset[str]
) -> tuple[Array | None, Array | None, Array | None]:
    rows, x = g.reshape(-1, g.shape[-1]), input.reshape(-1, input.shape[-1])
    grad_hidden = xp.matmul(rows, lora.up) * lora.scale
    dx = None
    if "input" in needs:
        dx = (xp.matmul(rows, weight) + xp.matmul(grad_hidden, lora.down)).reshape(input.shape)
    d_down = xp.matmul(grad_hidden.T, x) if "down" in needs else None
    d_up = xp.matmul(rows.T, lora_hidden.reshape(-1, lora_hidden.shape[-1])) if "up" in needs else None
    return dx, d_down, d_up


@lora_linear.vjp("weight")
def _(xp: Namespace, g: Array, input: Array) -> Array:
    return xp.matmul(g.reshape(-1, g.shape[-1]).T, input.reshape(-1, input.shape[-1]))


lora_linear.vjp("bias")(lambda xp, g: g)
lora_linear.vjp("residual")(lambda xp, g: g)


def _lora_linear_errors() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 7), (6, 8), None, (2, 8), (6, 2), 0.5), ShapeError, "last dim 7 but weight is")
    for down, up in (((2, 7), (6, 2)), ((2, 8), (5, 2)), ((2, 8), (6, 3)), ((8,), (6, 2)), ((2, 8), ())):
        factors = sample((2, 8), (6, 8), None, down, up, 0.5)
        yield ErrorSample(factors, ShapeError, r"expected down \(rank, 8\) and up \(6, rank\), got ")
    bad = sample((2, 8), (6, 8), None, (2, 8), (6, 2), 0.5, (6,))
    yield ErrorSample(bad, ShapeError, r"a residual of the result's shape, got \(6,\)")


lora_linear.errors(*_lora_linear_errors())


lora_linear.samples(
    sample((2, 3, 8), (6, 8), (6,), (2, 8), (6, 2), 0.5),
    sample((4, 8), (6, 8), None, (1, 8), (6, 1), 2.0),
    sample((2, 3, 8), (6, 8), (6,), (2, 8), (6, 2), 0.5, (2, 3, 6)),
)


def _lora_condition(
    input: Array, weight: Array, bias: Array | None, down: Array, up: Array, residual: Array | None
) -> str:
    return linear_condition(input, weight, bias) or conditions.same(conditions.ANY_FLOAT, input, down, up, residual)


@lora_linear.cuda("cublaslt", when=_lora_condition)
def _(
    k: Launcher, input: Array, weight: Array, bias: Array | None, lora: LowRank, residual: Array | None
) -> tuple[Array, Array]:
    check_linear(input, weight)
    check_factors("lora_linear", weight, lora.down, lora.up)
    check_residual("lora_linear", input, weight, residual)
    return k.lora_gemm(input, weight.T, lora.down.T, lora.up.T, lora.scale, bias=bias, plus=residual)


@lora_linear.cuda_vjp("cublaslt", "input", "down", "up", when=_lora_condition)
def _(
    k: Launcher, g: Array, input: Array, weight: Array, lora: LowRank, lora_hidden: Array, targets: GradTargets
) -> tuple[Array | None, Array | None, Array | None]:
    g, input = k.mergeable_rows(g), k.mergeable_rows(input)
    rows, x = (a.reshape(-1, a.shape[-1]) for a in (g, input))
    if "input" in targets:
        dx, grad_hidden = k.lora_gemm(g, weight, lora.up, lora.down, lora.scale, **product_target(targets["input"]))
    else:
        dx, grad_hidden = None, k.matmul(rows, lora.up, alpha=lora.scale)
    wanted = {n: [targets[n]] for n in ("down", "up") if n in targets}
    operands = SkinnyOperands(x, rows[:, None], grad_hidden, lora_hidden.reshape(len(x), -1), len(lora.down))
    made = factor_gradients(k, operands, wanted)
    return dx, made["down"][0] if "down" in made else None, made["up"][0] if "up" in made else None


@lora_linear.cuda_vjp("cublaslt", "residual", when=_lora_condition)
def _(k: Launcher, g: Array) -> Array:
    return g


# ---- several layers of one input ---------------------------------------------------------------------------


@composite(aux=("lora_hidden",), multiple=True)
def lora_linears(
    input: Tensor, weights: Sequence[Tensor], downs: Sequence[Tensor], ups: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    """lora_linear(input, weights[i], None, downs[i], ups[i], scale) for each i: queries, keys and values at once

    Returns:
        n of (..., out).

    Raises:
        ShapeError: the lists are of several lengths.
    """
    if not len(weights) == len(downs) == len(ups):
        raise ShapeError(f"lora_linears: {len(weights)} weights, {len(downs)} downs and {len(ups)} ups do not pair up")
    parts = zip(weights, downs, ups, strict=True)
    return tuple(lora_linear(input, w, None, d, u, scale) for w, d, u in parts)


def _lora_linears_errors() -> Iterator[ErrorSample]:
    pair = [(6, 8), (6, 8)]
    yield ErrorSample(sample((2, 8), pair, [(2, 8)], [(6, 2)], 0.5), ShapeError, "2 weights, 1 downs and 1 ups")


lora_linears.errors(*_lora_linears_errors())


lora_linears.samples(
    sample((2, 3, 8), [(6, 8), (6, 8)], [(2, 8), (2, 8)], [(6, 2), (6, 2)], 0.5),
    sample((4, 8), [(6, 8)], [(1, 8)], [(6, 1)], 2.0),
    sample((2, 8), [(6, 8), (4, 8)], [(2, 8), (1, 8)], [(6, 2), (4, 1)], 0.5),
)


def _stack_condition(input: Array, weights: Sequence[Array], downs: Sequence[Array], ups: Sequence[Array]) -> str:
    for what in (weights, downs, ups):
        if len({(w.shape, w.dtype) for w in what}) > 1 or len(what) != len(weights):
            return "layers of several shapes or dtypes"
    if weights[0].ndim != 2 or not input.ndim or input.shape[-1] != weights[0].shape[1]:
        return "an input of another width"
    if not factors_fit(weights[0], downs[0], ups[0]):
        return "factors that are refused"
    return linear_condition(input, weights[0], None) or conditions.same(conditions.ANY_FLOAT, input, downs[0], ups[0])


@lora_linears.cuda("cublaslt", when=_stack_condition)
def _(k: Launcher, input: Array, weights: Sequence[Array], lora: LowRanks) -> tuple[list[Array], Array]:
    return stacked_products(k, input, k.stacked(weights), lora)


def stacked_products(
    k: Launcher, input: Array, weight: Array, lora: LowRanks, bias: Array | None = None, plus: Array | None = None
) -> tuple[list[Array], Array]:
    """Returns n layers' outputs (..., out) of one input, from one product, and the activations (rows, n rank).

    `bias` and `plus`, which is added to the output, are for a single layer.

    Args:
        weight: (n, out, in).
        lora: the updates.
    """
    down, up = k.stacked(lora.downs), k.stacked(lora.ups)
    n, out, width = weight.shape
    x = k.contiguous(input).reshape(-1, width)
    matrices = weight.reshape(-1, width).T, down.reshape(-1, width).T, up.reshape(n * out, -1).T
    added = None if plus is None else plus.reshape(-1, out)
    y, lora_hidden = k.lora_gemm(x, *matrices, lora.scale, parts=n, bias=bias, plus=added)
    y, shape = y.reshape(-1, n, out), (*input.shape[:-1], out)
    return [y[:, i].reshape(shape) for i in range(n)], lora_hidden


Gradients = tuple[Array | None, list[Array] | None, list[Array] | None]
"""Those of n layers' input, downs and ups, as far as they are wanted."""


@lora_linears.cuda_vjp("cublaslt", "input", "downs", "ups", when=_stack_condition)
def _(
    k: Launcher, g: Sequence[Array], input: Array, weights: Sequence[Array], lora: AppliedLowRanks, targets: GradTargets
) -> Gradients:
    return stacked_gradients(k, g, input, k.stacked(weights), lora, targets)


def stacked_gradients(
    k: Launcher, g: Sequence[Array], input: Array, weight: Array, lora: AppliedLowRanks, targets: GradTargets
) -> Gradients:
    """Returns the gradients of input, downs and ups of `stacked_products`; None for each that is not wanted.

    Args:
        g: the outputs' gradients, n of (..., out).
        weight: their weights (n, out, in); only its shape is read if the input's gradient is not wanted.
        lora: their updates, with the activations as `stacked_products` returned them.
    """
    down, up = k.stacked(lora.downs), k.stacked(lora.ups)
    (n, out, width), rank = weight.shape, down.shape[1]
    x, rows = k.contiguous(input).reshape(-1, width), side_by_side(k, g)
    if "input" in targets:
        flat = k.contiguous(rows).reshape(*input.shape[:-1], n * out)
        matrices = weight.reshape(-1, width), up.reshape(-1, rank), down.reshape(-1, width)
        dx, grad_hidden = k.lora_gemm(flat, *matrices, lora.scale, splits=n, **product_target(targets["input"]))
    else:
        dx, grad_hidden = None, lora_hidden_grad(k, rows, up, lora.scale)
    made = factor_gradients(k, SkinnyOperands(x, rows, grad_hidden, lora.lora_hidden, rank), listed(targets, n))
    return dx, made.get("down"), made.get("up")


def lora_hidden_grad(k: Launcher, rows: Array, up: Array, scale: float) -> Array:
    """(M, n rank): the gradients of the low-rank activations, scale * rows (M, n, out) @ up (n, out, rank)."""
    n, _, rank = up.shape
    grad_hidden = k.empty((len(rows), n * rank), rows.dtype)
    k.matmul(rows.transpose(1, 0, 2), up, out=grad_hidden.reshape(-1, n, rank).transpose(1, 0, 2), alpha=scale)
    return grad_hidden


lora_linears.perf_samples(
    sample((2, 77, 320), [(640, 320)] * 3, [(16, 320)] * 3, [(640, 16)] * 3, 0.5),
    sample((100, 96), [(64, 96)] * 2, [(4, 96)] * 2, [(64, 4)] * 2, 1.0),
    sample((2, 300, 64), [(72, 64)] * 2, [(32, 64)] * 2, [(72, 32)] * 2, 1.0),
    sample((1, 700, 136), [(200, 136)] * 3, [(16, 136)] * 3, [(200, 16)] * 3, 0.5),
)


# ---- convolutions ------------------------------------------------------------------------------------------


@composite()
def lora_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    stride: Pair = 1,
    padding: Pair = 0,
    layout: str = "NCHW",
) -> Tensor:
    """conv2d(input, weight, bias) + conv1x1(scale * conv2d(input, down), up): down keeps the kernel, up is 1x1

    Args:
        input: (B, in, H, W), or (B, H, W, in) in NHWC.
        weight: (out, in, kh, kw).
        down: (rank, in, kh, kw).
        up: (out, rank, 1, 1).
        stride: pixels from one position of the kernel to the next.
        padding: pixels around the image.

    Returns:
        (B, out, oh, ow), or (B, oh, ow, out).
    """
    lora_hidden = conv2d(input, down, None, stride, padding, layout=layout) * scale
    update = conv2d(lora_hidden, up, layout=layout)
    return conv2d(input, weight, bias, stride, padding, layout=layout) + update


def _lora_conv2d_errors() -> Iterator[ErrorSample]:
    bad = sample((1, 4, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5)
    yield ErrorSample(bad, ShapeError, "has 4 channels but weight .* takes 3")


lora_conv2d.errors(*_lora_conv2d_errors())


lora_conv2d.samples(
    sample((1, 4, 3, 3), (5, 3, 3, 3), (5,), (2, 3, 3, 3), (5, 2, 1, 1), 0.5, 1, 1, "NHWC"),
    sample((1, 3, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5),
)
lora_linear.perf_samples(
    sample((2, 77, 320), (640, 320), (640,), (16, 320), (640, 16), 0.5),
    sample((100, 96), (64, 96), None, (4, 96), (64, 4), 1.0),
    sample((1, 521, 136), (72, 136), (72,), (16, 136), (72, 16), 0.5),
    sample((2, 1300, 64), (128, 64), None, (48, 64), (128, 48), 1.5),
    sample((2, 77, 320), (640, 320), (640,), (16, 320), (640, 16), 0.5, (2, 77, 640)),
)
