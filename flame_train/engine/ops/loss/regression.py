"""Losses between numbers. `reduction` is "mean", "sum" or "none", as in PyTorch."""

from __future__ import annotations

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...tensors.tensor import Tensor
from .pair_kernels import PairLoss, pair_loss_kernels


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

pair_loss_kernels(mse_loss, lambda: PairLoss("(input - target) * (input - target)", "2.f * (input - target)"))

pair_loss_kernels(l1_loss, lambda: PairLoss("fabsf(input - target)", "sign(input - target)"))

for _op in (mse_loss, l1_loss):
    _op.perf_samples(sample((4, 4, 128, 128), (4, 4, 128, 128)), sample((3, 3, 77), (3, 3, 77), reduction="sum"))

for _op in (mse_loss, l1_loss):
    _op.errors(
        ErrorSample(sample((2, 3), (2, 1)), ShapeError, "must have one shape"),
        ErrorSample(sample((2,), (2,), reduction="max"), ValueError, "'mean', 'sum' or 'none', got 'max'"),
    )
