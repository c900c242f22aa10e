"""What launchers say to the kernel generators: programs along rows, reductions, and how operands meet the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...dtype import Array


@dataclass(frozen=True, slots=True)
class Program:
    """What is done along a row: the steps, the values an element to be written, and the values a row; see `rows`."""

    steps: tuple[str, ...]
    rows: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is taken together ("sum", "max" or "min" of `value`) and what becomes of `total`, of `n` elements."""

    how: str
    value: str
    result: str = "total"


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a reduction: an output for each of `outer` and `inner`, made of `reduced` elements."""

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
    """By name: rows of their own (..., C), shared rows, one element a row (R,), and plain numbers.

    R counts the rows in row-major order of their leading dims, which for all operands are the same.
    """

    rows: Mapping[str, Array]
    tables: Mapping[str, Table] = field(default_factory=dict)
    columns: Mapping[str, Array] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
