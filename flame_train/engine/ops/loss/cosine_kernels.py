"""Cosine similarities of rows, and their gradients, each in one pass over both tensors."""

from __future__ import annotations

from ...backend.cuda.codegen.kernel_ir import Operands, Program
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...op import Op
from ..common.conditions import AT_MOST_FP32, same
from ..common.row_kernels import rows_at, why_not_rows

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
    """Why row kernels cannot take these; "" if they can."""
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
