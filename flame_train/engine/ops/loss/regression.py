"""Losses between numbers, and their kernels. `reduction` is "mean", "sum" or "none", as in PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import ShapeError
from ...arguments import named
from ...backend.cuda.codegen.kernel_ir import Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, promote
from ...namespace import Namespace
from ...op import ErrorSample, Op, primitive, sample
from ...tensors.tensor import Tensor
from ..common.conditions import floating
from ..common.row_kernels import reduce, why_not_reduction

REFUSED = "arguments that are refused"


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A loss in CUDA C over `input`, `target` and the op's numbers: its value and its derivatives.

    Without a derivative with respect to the target that is minus the other.
    """

    value: str
    input: str
    target: str = ""


def pair_loss_kernels(
    op: Op, choose: Callable[..., PairLoss | str], reductions: Sequence[str] = ("mean", "sum", "none")
) -> None:
    """Declares a loss's kernels, forward and for both gradients."""
    more = list(inspect.signature(choose).parameters)

    def possible(input: Array, target: Array, reduction: str, *rest: Any) -> str:
        if input.shape != target.shape or reduction not in reductions:
            return REFUSED
        found = choose(*rest)
        return found if isinstance(found, str) else why_not_reduction(input, range(input.ndim)) or floating(target)

    def forward(k: Launcher, input: Array, target: Array, reduction: str, **rest: Any) -> Array:
        loss, dtype = _chosen(choose, rest), promote([input.dtype, target.dtype])
        assert dtype is not None  # the guard asks for floats
        operands, numbers = {"input": input, "target": target}, _numbers(rest)
        if reduction == "none":
            return k.elementwise((loss.value,), operands | numbers, (dtype,))[0]
        total = Reduction("sum", loss.value, _result(input, reduction))
        return reduce(k, total, operands, range(input.ndim), dtype, numbers=numbers).reshape(())

    when = named(possible, ["input", "target", "reduction", *more])
    op.cuda("reduction", when=when)(named(forward, ["k", "input", "target", "reduction", *more]))
    for arg in ("input", "target"):
        names = ["k", "g", "input", "target", "reduction", *more]
        op.cuda_vjp("reduction", arg, when=when)(named(_backward(arg, choose, more), names))


def _backward(arg: str, choose: Callable[..., PairLoss | str], more: list[str]) -> Callable[..., Array]:
    def backward(k: Launcher, g: Array, input: Array, target: Array, reduction: str, *rest: Any) -> Array:
        """Returns the gradient of the argument."""
        given = dict(zip(more, rest, strict=True))
        loss = _chosen(choose, given)
        mirrored = arg == "target" and not loss.target
        slope = loss.target if arg == "target" and loss.target else loss.input
        part = -_part(input, reduction) if mirrored else _part(input, reduction)
        operands = {"g": g, "input": input, "target": target, "part": part}
        return k.elementwise((f"g * part * ({slope})",), operands | _numbers(given), (g.dtype,), input.shape)[0]

    return backward


def _chosen(choose: Callable[..., PairLoss | str], rest: dict[str, Any]) -> PairLoss:
    loss = choose(**rest)
    assert isinstance(loss, PairLoss)  # the guard saw to it
    return loss


def _numbers(rest: dict[str, Any]) -> dict[str, float]:
    """Returns those of the further arguments that expressions may name."""
    return {n: v for n, v in rest.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _result(input: Array, reduction: str) -> str:
    """Returns the loss from the sum over all pairs, in C. A batch is the first dim, as kl_div's "batchmean" has it."""
    if reduction == "batchmean":
        return f"total / {input.shape[0] if input.ndim else 1}.f"
    return "total / n" if reduction == "mean" else "total"


def _part(input: Array, reduction: str) -> float:
    """Returns the derivative of the loss with respect to the sum over all pairs."""
    if reduction == "batchmean":
        return 1.0 / (input.shape[0] if input.ndim else 1)
    return 1.0 / input.size if reduction == "mean" else 1.0


def reduced(xp: Namespace, loss: Array, reduction: str) -> Array:
    """Returns the losses averaged, summed or as they are. Raises ValueError for another reduction."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss: expected reduction 'mean', 'sum' or 'none', got {reduction!r}")
    return xp.mean(loss) if reduction == "mean" else xp.sum(loss)


def share(g: Array, count: int, reduction: str) -> Array:
    """Returns the gradient of each entry's loss, given that of the reduced one."""
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
