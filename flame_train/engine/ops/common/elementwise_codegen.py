"""Elementwise kernels from expressions: one line below an op declares a kernel for it and for each of its gradients.

An expression is C over the names of the op's arguments, `g`, `out` and the functions of `dtypes.cuh`. It is compiled
for the dtypes and memory layouts that occur. Precision is that of references: fp32 inside, rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...arguments import named
from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.codegen.kernel_ir import expression
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, float32, result_type
from ...op import Op
from .conditions import floating, generated
from .dims import Shape
from .row_kernels import summed


def elementwise_kernel(
    op: Op,
    forward: str = "",
    *,
    when: Callable[..., bool | str] | None = None,
    result: DType | None = None,
    missing: Mapping[str, float] | None = None,
    gradients: Mapping[str, str] | None = None,
    booleans: bool = False,
    **more: str,
) -> None:
    """Declares a generated kernel for `op`, by the expression `forward`, and for the gradients named.

    Without an expression they are those that the reference and the formulas compute.

    A gradient that is just "g", or "alpha * g" with alpha 1, is `g` itself, without a kernel. It needs one where it
    must be summed or added to another.

    Args:
        forward: the expression of the result, in CUDA C over the arguments' names.
        when: a further condition, a function of any of the op's arguments.
        result: the output's dtype; None: that of the operands.
        missing: by argument, the number that None stands for.
        gradients: expressions by argument, for arguments that have the name of a parameter here.
        booleans: whether all tensors may be truth values; else one must be floating.
        more: expressions of the other arguments' gradients.
    """
    defaults = dict(missing or {})
    if not forward:
        forward = expression(op.fn, op.names)
        gradients = {f.args[0]: expression(f.fn, ("g", *f.names)) for f in op.formulas}
    condition = (_of_tensors(op, generated if booleans else floating), *([when] if when else []))
    op.cuda("generated", when=condition)(_forward(op, forward, result, defaults))
    for arg, text in {**(gradients or {}), **more}.items():
        op.cuda_vjp("generated", arg, when=condition)(_gradient(op, arg, text, defaults))


def _of_tensors(op: Op, condition: Callable[..., str]) -> Callable[..., str]:
    """Returns the condition of the op's tensors."""
    return named(lambda *values: condition(*values), op.tensor_names)


def _used(expression: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of `names` that occur in an expression."""
    words = set(re.findall(r"[A-Za-z_]\w*", expression))
    return tuple(n for n in names if n in words)


def _forward(op: Op, expression: str, result: DType | None, missing: Mapping[str, float]) -> Callable[..., Array]:
    used = _used(expression, op.names)

    def launch(k: Launcher, **values: Any) -> Array:
        operands = {n: missing[n] if values[n] is None else values[n] for n in used}
        dtype = result or result_type([values[n] for n in op.tensor_names if hasattr(values[n], "dtype")])
        assert dtype is not None  # the guard asks for a floating operand
        return k.elementwise((expression,), operands, (dtype,))[0]

    return named(launch, ["k", *op.names])


def _gradient(op: Op, arg: str, expression: str, missing: Mapping[str, float]) -> Callable[..., Array]:
    used = _used(expression, (*op.names, *op.aux, "out"))

    def launch(k: Launcher, g: Array, *values: Any, targets: GradTargets) -> Array:
        operands = {n: missing[n] if v is None else v for n, v in zip(used, values, strict=False)}
        text = expression.removeprefix("alpha * ") if operands.get("alpha") == 1 else expression
        return broadcast_grad(k, text, {"g": g, **operands}, values[-1], targets[arg])

    return named(launch, ["k", "g", *used, f"{arg}_shape", "targets"])


def broadcast_grad(
    k: Launcher, expression: str, operands: Mapping[str, Any], shape: Shape, target: GradTarget = ALLOCATE
) -> Array:
    """The gradient of an argument of `shape`: `expression` over `g` and other operands, summed down to that shape.

    What has arrived at `target` is added. The target's buffer is used if nothing has arrived and nothing is summed.
    """
    g = operands["g"]
    if shape != g.shape:
        total = _summed(k, expression, operands, shape)
        if target.addend is None:
            return total
        added = {"g": total, "addend": target.addend}
        return k.elementwise(("g + addend",), added, (target.addend.dtype,), shape)[0]
    if target.addend is not None:
        before, _, last = expression.rpartition(";")
        expression = f"{before}{';' if before else ''}({last}) + addend"
        return k.elementwise((expression,), {**operands, "addend": target.addend}, (target.addend.dtype,), shape)[0]
    if expression == "g":
        return g
    return k.elementwise((expression,), operands, (g.dtype,), shape, () if target.buffer is None else (target.buffer,))[
        0
    ]


def _summed(k: Launcher, expression: str, operands: Mapping[str, Any], shape: Shape) -> Array:
    """Sums `expression` over the dims that `shape` was broadcast along, in one pass or with fp32 between several."""
    g = operands["g"]
    lead = g.ndim - len(shape)
    dims = [*range(lead), *(i + lead for i, n in enumerate(shape) if n == 1 != g.shape[i + lead])]
    if g.size == 0:
        return k.xp.zeros(shape, float32)
    if ";" in expression or any(v.shape != g.shape for v in operands.values() if hasattr(v, "shape")):
        operands, expression = {"each": k.elementwise((expression,), operands, (float32,), g.shape)[0]}, "each"
    arrays = {n: v for n, v in operands.items() if hasattr(v, "dtype")}
    numbers = {n: v for n, v in operands.items() if n not in arrays}
    return summed(k, expression, arrays, dims, g.dtype, numbers).reshape(shape)
