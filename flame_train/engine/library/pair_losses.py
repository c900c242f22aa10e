"""Losses of pairs beside the mean square and the mean distance: Huber's and the cosine."""

from __future__ import annotations

from ...errors import ShapeError
from ..backend.cuda.codegen.kernel_ir import Operands, Program
from ..backend.cuda.launcher import Launcher
from ..dtype import Array
from ..namespace import Namespace
from ..op import ErrorSample, Op, composite, primitive, sample
from ..op_samples import Values
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import axis
from ..ops.common.row_kernels import rows_at, why_not_rows
from ..ops.loss.regression import REFUSED, PairLoss, check_pair, l1_loss, pair_loss_kernels, reduced, share
from ..tensors.tensor import Tensor

_STEPS = (
    "sum s1 = x1 * x1",
    "sum s2 = x2 * x2",
    "sum dot = x1 * x2",
    "let n1 = larger(sqrtf(s1), eps)",
    "let n2 = larger(sqrtf(s2), eps)",
    "let cosine = dot / n1 / n2",
)

_GRADIENTS = {
    "x1": ("let turn1 = n1 > eps ? cosine / n1 : 0.f", "g / n1 * (x2 / n2 - turn1 * x1)"),
    "x2": ("let turn2 = n2 > eps ? cosine / n2 : 0.f", "g / n2 * (x1 / n1 - turn2 * x2)"),
}
"""For each tensor how far its own direction is taken out, none where its norm is held at eps, and its gradient."""


def _no_rows(x1: Array, x2: Array, dim: int) -> str:
    """Says why row kernels cannot take these; "" if they can."""
    if not x1.ndim or x1.shape != x2.shape or isinstance(dim, bool) or dim not in (-1, x1.ndim - 1):
        return "shapes that broadcast, or another dim than the last"
    return same(AT_MOST_FP32, x1, x2) or why_not_rows(x1, 1, x2)


def cosine_kernels(op: Op) -> None:
    """Declares the kernels of `cosine_similarity`."""

    @op.cuda("rows", when=_no_rows)
    def _(k: Launcher, x1: Array, x2: Array, eps: float) -> Array:
        operands = Operands({"x1": rows_at(k, x1), "x2": rows_at(k, x2)}, numbers={"eps": eps})
        return k.rows(Program(_STEPS, (), ("cosine",)), operands, (x1.dtype,))[0].reshape(x1.shape[:-1])

    @op.cuda_vjp("rows", "x1", "x2", when=_no_rows)
    def _(
        k: Launcher, g: Array, x1: Array, x2: Array, eps: float, needs: frozenset[str]
    ) -> tuple[Array | None, Array | None]:
        wanted = [n for n in _GRADIENTS if n in needs]
        steps, rows = zip(*(_GRADIENTS[n] for n in wanted), strict=True)
        operands = Operands(
            {"x1": rows_at(k, x1), "x2": rows_at(k, x2)}, {}, {"g": k.contiguous(g).reshape(-1)}, {"eps": eps}
        )
        made = k.rows(Program((*_STEPS, *steps), rows), operands, (g.dtype,) * len(rows))
        found = {n: a.reshape(x1.shape) for n, a in zip(wanted, made, strict=True)}
        return found.get("x1"), found.get("x2")


@primitive(torch="nn.functional.huber_loss")
def huber_loss(xp: Namespace, input: Array, target: Array, reduction: str = "mean", delta: float = 1.0) -> Array:
    """d^2 / 2 where |d| < delta, else delta * (|d| - delta / 2), for d = input - target

    Args:
        input: the input.
        target: in input's shape.
        reduction: "mean", "sum" or "none".
        delta: where the square becomes a line, above 0.

    Returns:
        A number, or input's shape.

    Raises:
        ValueError: delta of 0 or less.
    """
    check_pair("huber_loss", input, target)
    if delta <= 0:
        raise ValueError(f"huber_loss: expected delta above 0, got {delta}")
    size = xp.abs(input - target)
    return reduced(xp, xp.where(size < delta, 0.5 * size * size, delta * (size - 0.5 * delta)), reduction)


@huber_loss.vjp("input")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str, delta: float) -> Array:
    return share(g, input.size, reduction) * xp.clip(input - target, -delta, delta)


@huber_loss.vjp("target")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str, delta: float) -> Array:
    return share(g, input.size, reduction) * xp.clip(target - input, -delta, delta)


huber_loss.samples(sample((2, 3), (2, 3)), sample((2, 3), (2, 3), "sum", 0.5), sample((2, 3), (2, 3), "none", 2.0))

huber_loss.errors(ErrorSample(sample((2,), (2,), delta=0.0), ValueError, "delta above 0, got 0.0"))


def _huber(delta: float) -> PairLoss | str:
    return (
        REFUSED
        if delta <= 0
        else PairLoss(
            "fabsf(input - target) < delta ? 0.5f * (input - target) * (input - target) "
            ": delta * (fabsf(input - target) - 0.5f * delta)",
            "fminf(fmaxf(input - target, -delta), delta)",
        )
    )


pair_loss_kernels(huber_loss, _huber)

for _op in (huber_loss,):
    _op.perf_samples(sample((4, 4, 128, 128), (4, 4, 128, 128)), sample((3, 3, 77), (3, 3, 77), reduction="sum"))


@composite(torch="nn.functional.smooth_l1_loss")
def smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """d^2 / (2 beta) where |d| < beta, else |d| - beta / 2, for d = input - target: huber_loss over beta"""
    check_pair("smooth_l1_loss", input, target)
    if beta < 0.0:
        raise ValueError(f"smooth_l1_loss: expected beta of at least 0, got {beta}")
    if beta == 0.0:
        return l1_loss(input, target, reduction=reduction)
    return huber_loss(input, target, reduction, beta) / beta


smooth_l1_loss.errors(
    ErrorSample(sample((2, 3), (2, 1)), ShapeError, "^smooth_l1_loss: input"),
    ErrorSample(sample((2,), (2,), reduction="max"), ValueError, "'mean', 'sum' or 'none', got 'max'"),
    ErrorSample(sample((2,), (2,), beta=-1.0), ValueError, "smooth_l1_loss: expected beta of at least 0"),
)

smooth_l1_loss.samples(
    sample((2, 3), (2, 3)),
    sample((2, 3), (2, 3), reduction="sum", beta=0.5),
    sample((2, 3), (2, 3), reduction="none", beta=0.0),
)


@primitive(torch="nn.functional.cosine_similarity")
def cosine_similarity(xp: Namespace, x1: Array, x2: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    """x1 . x2 / (max(|x1|, eps) * max(|x2|, eps)) along dim

    Args:
        x1, x2: vectors along dim; they broadcast.
        dim: the dim along which it works.
        eps: the least norm that is divided by.

    Returns:
        The broadcast shape without dim.
    """
    a, b, _, _ = _unit(xp, x1, x2, dim, eps)
    return xp.sum(a * b, axis=dim)


def _unit(xp: Namespace, x1: Array, x2: Array, dim: int, eps: float) -> tuple[Array, Array, Array, Array]:
    """Returns both tensors divided by their norms along dim, and these norms, which are at least eps."""
    x1, x2 = xp.broadcast_arrays(x1, x2)
    dim = axis(dim, x1.ndim, "cosine_similarity")
    if x1.ndim == 0:
        x1, x2 = x1.reshape(1), x2.reshape(1)
    n1, n2 = (xp.maximum(xp.sqrt(xp.sum(x * x, axis=dim, keepdims=True)), eps) for x in (x1, x2))
    return x1 / n1, x2 / n2, n1, n2


@cosine_similarity.vjp("x1", "x2")
def _(xp: Namespace, g: Array, x1: Array, x2: Array, dim: int, eps: float) -> tuple[Array, Array]:
    a, b, n1, n2 = _unit(xp, x1, x2, dim, eps)
    g, cosine = xp.expand_dims(g, dim), xp.sum(a * b, axis=dim, keepdims=True)
    turn1, turn2 = (xp.where(n > eps, cosine, 0.0) for n in (n1, n2))  # a norm held at eps does not follow its vector
    return g * (b - turn1 * a) / n1, g * (a - turn2 * b) / n2


cosine_kernels(cosine_similarity)

cosine_similarity.perf_samples(sample((300, 640), (300, 640), -1), sample((3, 70, 1281), (3, 70, 1281), 2, 0.5))

cosine_similarity.errors(
    ErrorSample(sample((2, 3), (2, 4)), ShapeError, r"of x1 \(2, 3\), x2 \(2, 4\) do not broadcast together"),
    ErrorSample(sample((2, 3), (2, 3), 2), ShapeError, "dim 2 is outside a tensor of 2 dims"),
)

cosine_similarity.samples(
    sample((3, 4), (3, 4)),
    sample((2, 3, 4), (3, 1), dim=-2),
    sample(Values((2, 5), 0.5, 2.0), (2, 5), 1, 1e-3),
    sample(Values((2, 5), -0.1, 0.1), Values((2, 5), 0.5, 2.0), 1, 0.5),
    sample((), (), dim=0),
)
