"""Matrices cut to a triangle."""

from __future__ import annotations

from ....errors import ShapeError
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from ...namespace import Namespace
from ...op import ErrorSample, Op, primitive, sample
from ...op_samples import booleans, integers
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape, at_least
from ..common.elementwise_codegen import broadcast_grad


@primitive(torch="triu", accepts_integers=True)
def triu(xp: Namespace, input: Array, diagonal: int = 0) -> Array:
    """The entries on and above the diagonal of the last two dims, zeros below"""
    return xp.where(_above(xp, input.shape, diagonal), input, xp.zeros((), input.dtype))


@primitive(torch="tril", accepts_integers=True)
def tril(xp: Namespace, input: Array, diagonal: int = 0) -> Array:
    """The entries on and below the diagonal of the last two dims, zeros above"""
    return xp.where(_above(xp, input.shape, diagonal + 1), xp.zeros((), input.dtype), input)


def _above(xp: Namespace, shape: Shape, diagonal: int) -> Array:
    """True where column - row >= diagonal, (rows, columns)."""
    at_least(2, shape, "triu, tril")
    return xp.arange(shape[-1])[None, :] - xp.arange(shape[-2])[:, None] >= diagonal


triu.vjp("input")(lambda xp, g, diagonal: xp.where(_above(xp, g.shape, diagonal), g, 0))
tril.vjp("input")(lambda xp, g, diagonal: xp.where(_above(xp, g.shape, diagonal + 1), 0, g))


def _no_triangle(input: Array) -> str:
    if input.ndim < 2 or max(input.shape[-2:]) > 1 << 23:
        return "fewer than 2 dims, or places that fp32 does not count"
    return same(AT_MOST_FP32, input)


def _triangle_kernels(op: Op, kept: str) -> None:
    """The op's kernels and its gradient's, by the condition under which an entry is kept."""

    def forward(k: Launcher, input: Array, diagonal: int) -> Array:
        operands = {"input": input, **_places(k, input.shape), "diagonal": diagonal}
        return k.elementwise((f"{kept} ? input : 0.f",), operands, (input.dtype,))[0]

    def backward(k: Launcher, g: Array, diagonal: int, targets: GradTargets) -> Array:
        operands = {"g": g, **_places(k, g.shape), "diagonal": diagonal}
        return broadcast_grad(k, f"{kept} ? g : 0.f", operands, g.shape, targets["input"])

    op.cuda("generated", when=_no_triangle)(forward)
    op.cuda_vjp("generated", "input", when=_no_triangle)(backward)


def _places(k: Launcher, shape: Shape) -> dict[str, Array]:
    """The row and the column of each entry, as numbers that broadcast over the last two dims."""
    rows, columns = (k.xp.arange(n, dtype=float32) for n in shape[-2:])
    return {"row": rows[:, None], "column": columns[None]}


_triangle_kernels(triu, "column - row >= diagonal")
_triangle_kernels(tril, "column - row <= diagonal")

for _op in (triu, tril):
    _op.perf_samples(sample((3, 70, 133), 5), sample((300, 77), -3))

for _op in (triu, tril):
    _op.samples(
        sample((3, 4)), sample((2, 4, 3), 1), sample((4, 4), -2), sample(booleans(3, 4), 1), sample(integers(9, 4, 3))
    )
    _op.errors(ErrorSample(sample((3,)), ShapeError, "at least 2 dims"))
