"""The vocabulary between launchers and kernel generators: programs along rows, reductions, and their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....dtype import Array, DType, bool_, float32
from .scalars import Trace, Traced


@dataclass(frozen=True, slots=True)
class Program:
    """A program along a row, see `rows.py`: steps, and expressions for outputs.

    `rows` are the outputs with a value for each element, `numbers` those with a value for each row.
    """

    steps: tuple[str, ...]
    rows: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @property
    def rotates(self) -> int:
        """The group of columns that a step rotates together; 0 where none does."""
        groups = [int(step[6 : step.index(" ")]) for step in self.steps if step.startswith("rotate")]
        return groups[0] if groups else 0


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction: `how` ("sum", "max", "min" or "prod") over the expression `value`.

    The output is the expression `result` over `total` and `n`, the number of elements.
    """

    how: str
    value: str
    result: str = "total"


class Extent(NamedTuple):
    """The sizes of a reduction of (outer, reduced, inner) to (outer, inner)."""

    outer: int
    reduced: int
    inner: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows shared by others: row r of the whole takes row (r / run) % count of `array`, (count, C)."""

    array: Array
    run: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True)
class Operands:
    """What a kernel reads, by name: `rows` (..., C), `tables` of shared rows, `columns` (R,), plain `numbers`.

    R is the number of rows, counted in row-major order of their leading dims, which are the same for all `rows`.
    """

    rows: Mapping[str, Array]
    tables: Mapping[str, Table] = field(default_factory=dict)
    columns: Mapping[str, Array] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


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
    """Returns `function(xp, <names>)` in C over these names, which are fp32 numbers.

    Raises `TypeError` for a function that branches on a value.
    """
    trace = Expression()
    return trace.cast(function(trace, *(Traced(trace, float32, n) for n in names)), float32)
