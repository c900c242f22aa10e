"""The vocabulary between launchers and kernel generators: programs along rows, reductions, and their operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ....dtype import Array


@dataclass(frozen=True, slots=True)
class Program:
    """A program along a row, see `rows.py`: steps, and expressions for outputs.

    `rows` are the outputs with a value for each element, `numbers` those with a value for each row.
    """

    steps: tuple[str, ...]
    rows: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


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
