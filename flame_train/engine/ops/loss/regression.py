"""Losses between numbers. `reduction` is "mean", "sum" or "none", as in PyTorch."""

from __future__ import annotations

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...op_samples import Values
from ...tensors.tensor import Tensor
from ..common.dims import axis
from .cosine_kernels import cosine_kernels
from .pair_kernels import REFUSED, PairLoss, pair_loss_kernels


def reduced(xp: Namespace, loss: Array, reduction: str) -> Array:
    """The losses averaged, summed or as they are. Raises ValueError for another reduction."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss: expected reduction 'mean', 'sum' or 'none', got {reduction!r}")
    return xp.mean(loss) if reduction == "mean" else xp.sum(loss)


def share(g: Array, count: int, reduction: str) -> Array:
    """The gradient of each entry's loss, given that of the reduced one."""
    return g / max(count, 1) if reduction == "mean" else g


def check_pair(op: str, input: Array | Tensor, target: Array | Tensor) -> None:
    """Raises ShapeError unless input and target have the same shape: a loss that broadcasts is usually a mistake."""
    if input.shape != target.shape:
        raise ShapeError(f"{op}: input {tuple(input.shape)} and target {tuple(target.shape)} must have one shape")


@primitive(torch="nn.functional.mse_loss")
def mse_loss(xp: Namespace, input: Array, target: Array, *, reduction: str = "mean") -> Array:
    """(input - target)^2"""
    check_pair("mse_loss", input, target)
    return reduced(xp, (input - target) ** 2, reduction)


@mse_loss.vjp("input")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str) -> Array:
    return share(g, input.size, reduction) * 2.0 * (input - target)


@mse_loss.vjp("target")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str) -> Array:
    return share(g, input.size, reduction) * 2.0 * (target - input)


@primitive(torch="nn.functional.l1_loss")
def l1_loss(xp: Namespace, input: Array, target: Array, *, reduction: str = "mean") -> Array:
    """|input - target|"""
    check_pair("l1_loss", input, target)
    return reduced(xp, xp.abs(input - target), reduction)


@l1_loss.vjp("input")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str) -> Array:
    return share(g, input.size, reduction) * xp.sign(input - target)


@l1_loss.vjp("target")
def _(xp: Namespace, g: Array, input: Array, target: Array, reduction: str) -> Array:
    return share(g, input.size, reduction) * xp.sign(target - input)


for _op in (mse_loss, l1_loss):
    _op.samples(
        sample((2, 3), (2, 3)), sample((2, 3), (2, 3), reduction="sum"), sample((2, 3), (2, 3), reduction="none")
    )


@primitive(torch="nn.functional.huber_loss")
def huber_loss(xp: Namespace, input: Array, target: Array, reduction: str = "mean", delta: float = 1.0) -> Array:
    """d^2 / 2 where |d| < delta, else delta * (|d| - delta / 2), for d = input - target

    Args:
        xp: the array namespace.
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


pair_loss_kernels(mse_loss, lambda: PairLoss("(input - target) * (input - target)", "2.f * (input - target)"))
pair_loss_kernels(l1_loss, lambda: PairLoss("fabsf(input - target)", "sign(input - target)"))


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
for _op in (mse_loss, l1_loss, huber_loss):
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


for _op in (mse_loss, l1_loss):
    _op.errors(
        ErrorSample(sample((2, 3), (2, 1)), ShapeError, "must have one shape"),
        ErrorSample(sample((2,), (2,), reduction="max"), ValueError, "'mean', 'sum' or 'none', got 'max'"),
    )
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
        xp: the array namespace.
        x1, x2: vectors along dim; they broadcast.
        dim: the dim along which it works.
        eps: the least norm that is divided by.

    Returns:
        The broadcast shape without dim.
    """
    a, b, _, _ = _unit(xp, x1, x2, dim, eps)
    return xp.sum(a * b, axis=dim)


def _unit(xp: Namespace, x1: Array, x2: Array, dim: int, eps: float) -> tuple[Array, Array, Array, Array]:
    """Both tensors divided by their norms along dim, and these norms, which are at least eps.

    Args:
        xp: the array namespace.
        x1, x2: the tensors.
        dim: the dim along which it works.
        eps: the least norm.

    Returns:
        Both units, and both norms.
    """
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
