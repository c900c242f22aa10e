"""Kernels from expressions: one line beside an op gives it one for its forward pass and for each gradient.

An expression is C over the op's arguments by their names, `g` and `out`, and the functions of `elements.cuh`; it is
compiled for the dtypes and memory layouts that occur. Precision is the references': fp32 inside, rounded once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..dtype import Array, DType, bfloat16, bool_, float16, float32, promote
from ..op import Op

TAKEN = frozenset({float32, float16, bfloat16, bool_})


def generated(
    op: Op, forward: str, *, when: Callable[..., bool | str] | None = None, result: DType | None = None,
    missing: Mapping[str, float] | None = None, **gradients: str,
) -> None:  # fmt: skip
    """Declares a generated kernel for `op` and for the gradients named.

    `when` is a further condition, on any of the op's arguments; `result` the output's dtype if it is not the operands';
    `missing` what an argument given as None counts as. The gradient "g" is handed on without a kernel.
    """
    stands = dict(missing or {})
    condition = _condition(op, when)
    op.cuda("generated", when=condition)(_forward(op, forward, result, stands))
    for arg, expression in gradients.items():
        op.cuda_vjp("generated", arg, when=condition)(_gradient(op, arg, expression, stands))


def floating(*operands: Any) -> str:
    """Why generated kernels cannot take these operands, of which numbers and None are no concern."""
    dtypes = [a.dtype for a in operands if hasattr(a, "dtype")]
    for d in dtypes:
        if d not in TAKEN:
            return f"no kernel for {d.name}"
    return "" if any(d != bool_ for d in dtypes) else "no floating operand"


def _condition(op: Op, when: Callable[..., bool | str] | None) -> Callable[..., bool | str]:
    names = list(op.tensor_names)
    count = len(names)
    names += [n for n in inspect.signature(when).parameters if n not in names] if when else []
    asked = [names.index(n) for n in inspect.signature(when).parameters] if when else []

    def ask(*values: Any) -> bool | str:
        reason = floating(*values[:count])
        return reason if reason or when is None else when(*[values[i] for i in asked])

    return named(ask, names)


def named(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`fn` with the parameter names by which it is called and asked what it needs."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fn.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    return fn


def _used(expression: str, names: tuple[str, ...]) -> tuple[str, ...]:
    words = set(re.findall(r"[A-Za-z_]\w*", expression))
    return tuple(n for n in names if n in words)


def _forward(op: Op, expression: str, result: DType | None, missing: Mapping[str, float]) -> Callable[..., Array]:
    used = _used(expression, op.names)

    def launch(k: Any, **values: Any) -> Array:
        operands = {n: missing[n] if values[n] is None else values[n] for n in used}
        dtype = result or promote([values[n].dtype for n in op.tensor_names if hasattr(values[n], "dtype")])
        return k.elementwise((expression,), operands, (dtype,))[0]

    return named(launch, ["k", *op.names])


def _gradient(op: Op, arg: str, expression: str, missing: Mapping[str, float]) -> Callable[..., Array]:
    if expression == "g":
        return lambda k, g: g
    used = _used(expression, (*op.names, *op.aux, "out"))

    def launch(k: Any, g: Array, *values: Any) -> Array:
        operands = {n: missing[n] if v is None else v for n, v in zip(used, values, strict=False)}
        # What will be summed over a broadcast argument's dims is not rounded before.
        dtype = g.dtype if values[-1] == g.shape else float32
        return k.elementwise((expression,), {"g": g, **operands}, (dtype,), g.shape)[0]

    return named(launch, ["k", "g", *used, f"{arg}_shape"])
