"""Functions of single elements as expressions of C, by tracing: they are written over an array namespace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....dtype import DType, bool_, float32
from .scalars import Trace, Traced

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_NAMES = {"abs": "fabsf", "exp": "e_to", "sign": "sign"}
"""What CUDA and `dtypes.cuh` call a function of the namespace, unless it has the same name and an f."""
_SAME = ("ceil", "cos", "expm1", "floor", "log", "log1p", "sin", "tanh", "trunc")


class Expression(Trace):
    """The namespace of a function that becomes one expression, of which the compiler may fuse products with sums."""

    functions = {name: f"{_NAMES.get(name, f'{name}f')}({{0}})" for name in (*_NAMES, *_SAME)} | {
        "maximum": "larger({0}, {1})",
        "minimum": "smaller({0}, {1})",
    }

    def sqrt(self, x: Traced) -> Traced:
        return self.made("sqrtf({0})", x)

    def isfinite(self, x: Traced) -> Traced:
        return self.made("fabsf({0}) < INFINITE", x, dtype=bool_)

    def logical_not(self, x: Traced) -> Traced:
        return self.made("{0} == 0.f", x, dtype=bool_)

    def zeros_like(self, x: Traced) -> float:
        return 0.0

    def rounded(self, name: str, a: Any, b: Any) -> Traced:
        return self.made(f"{{0}} {_OPERATORS[name]} {{1}}", a, b)

    def noted(self, dtype: DType, text: str, *operands: Any) -> Traced:
        return Traced(self, dtype, f"({text})")


def expression(function: Callable[..., Any], names: Sequence[str]) -> str:
    """`function(xp, <names>)` in C over these names, which are fp32 numbers.

    Raises `TypeError` for a function that branches on a value.
    """
    trace = Expression()
    return trace.cast(function(trace, *(Traced(trace, float32, n) for n in names)), float32)
