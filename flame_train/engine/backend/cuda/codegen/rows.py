"""Kernels along rows, from programs: norms, softmax and their gradients, with each operand read once.

A program is a list of steps over a row's elements, in order:

- "sum NAME = EXPRESSION", "max ...", "min ..." and "prod ...": one number for a row, reduced from an expression over
  each element;
- "let NAME = EXPRESSION": one number for a row, computed from other such numbers;
- "row NAME = EXPRESSION": one value for each element, kept in registers. `rotate_every_two(NAME)` is then a rotation by
  90 degrees of each pair of neighbours: (a, b) becomes (-b, a). `rotate_half(NAME)` is that of pairs half a row apart:
  a thread then has the same packets of both halves;
- "rotate16 NAME = OTHER", 64 or 256, once a program: `row` values rotated by groups of so many (`convrot.cuh`). From
  then on a thread has other packets, so operands are used before the step or after it.

Expressions are C over the operands' names, those of earlier steps, `n` (the row's length) and what `dtypes.cuh`
defines. Contract of the generated kernels: operands are 16-byte aligned (others are copied first). The elements of a
row are contiguous, and rows lie at the strides of their leading dims, in operands and outputs. A row stays in the
registers of up to 1024 threads. Arithmetic and sums are fp32, sums in a fixed order. Outputs are assigned, never
accumulated. A kernel serves any number of rows, and all lengths that are divided alike (`row_tiling.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Any

import numpy as np

from ....dtype import Array, DType
from ..nvrtc import KernelModules
from ..tuning import SM_90, Tuning
from .broadcast_plan import Shape, Strides, merged
from .kernel_ir import Operands, Program, Table
from .row_codegen import ROTATED, Names, RowText, Signature
from .row_tiling import RowTiling, halved_tiling, row_tiling, staged_tiling


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a row program: its kernel's `signature` and `arguments`, and the outputs `made`.

    There are `count` rows of `columns` elements. All places of rows are multiples of `step` elements; where they are
    `dense`, they lie one after another, from an aligned address on.
    """

    signature: Signature
    count: int
    columns: int
    step: int
    dense: bool
    arguments: Sequence[Any]
    made: tuple[Array, ...]


class Rows:
    """Compiles and launches row programs."""

    def __init__(self, cupy: Any, modules: KernelModules, tuning: Tuning = SM_90) -> None:
        self._xp, self._modules, self.tuning = cupy, modules, tuning
        self._function = lru_cache(maxsize=1024)(self._compiled)

    def __call__(
        self, program: Program, operands: Operands, dtypes: Sequence[DType], out: Sequence[Array] = ()
    ) -> tuple[Array, ...]:
        """The program's outputs, first rows (..., C) and then numbers (R,): new arrays of `dtypes`, or `out`."""
        call = self.prepared(program, operands, dtypes, out)
        if call.count and call.columns:
            function, tiling = self._function(program, call.signature, call.columns, call.step, call.dense)
            rest = (np.uint32(call.count), np.uint32(call.columns))
            function((-(-call.count // tiling.rows),), (tiling.block,), (*call.arguments, *rest))
        return call.made

    def prepared(
        self, program: Program, operands: Operands, dtypes: Sequence[DType], out: Sequence[Array] = ()
    ) -> Call:
        """Returns what a kernel of the program is compiled for and given."""
        rotates = program.rotates > 0
        own = {n: self._aligned(a, rotates) for n, a in operands.rows.items()}
        first = next(iter(own.values()))
        lead, columns = first.shape[:-1], first.shape[-1]
        count = prod(lead)
        tables = {n: self._aligned(t.array) for n, t in operands.tables.items()}
        made = tuple(out) or tuple(
            self._xp.empty((*lead, columns) if i < len(program.rows) else (count,), d) for i, d in enumerate(dtypes)
        )
        kept = [*own.values(), *made[: len(program.rows)]]
        sizes, strides = _places(lead, columns, kept)
        arguments = _arguments(operands, own, tables, made, strides)
        arguments += [a for n in sizes[1:] for a in divisor(n)]
        dense = strides == ((columns,),) * len(kept) and not any(a.data.ptr & 15 for a in kept)
        signature = _signature(operands, own, tables, made, len(sizes))
        return Call(signature, count, columns, _step(columns, strides, kept), dense, arguments, made)

    def _aligned(self, a: Array, in_eights: bool = False) -> Array:
        odd = in_eights and any(s // a.itemsize % ROTATED for s in a.strides[:-1])
        if odd or (a.shape[-1] > 1 and a.strides[-1] != a.itemsize):
            a = self._xp.ascontiguousarray(a)
        return a.copy() if a.data.ptr & 15 else a  # a copy is aligned, as all blocks of the pool are

    def _compiled(self, program: Program, s: Signature, columns: int, step: int, dense: bool) -> tuple[Any, RowTiling]:
        tiling = self._tiling(program, s, columns, step, dense)
        return self._modules.generated(RowText(program, s, tiling, columns).source(), "rows"), tiling

    def _tiling(self, program: Program, s: Signature, columns: int, step: int, dense: bool) -> RowTiling:
        if pairs_halves(program):
            return halved_tiling(columns, demands(program, s, gcd(step, columns // 2))[0])
        width, wide, vectors = demands(program, s, step)
        passing = sum(d.itemsize for d in (*(d for _, d in s.rows), *s.outputs[: len(program.rows)]))
        # Eight rows of bytes may be no packets of 16.
        whole = dense and min(d.itemsize for d in _stored(program, s)) > 1 and not program.rotates
        together = 32 if program.rotates > 16 else max(1, program.rotates // ROTATED)
        return (staged_tiling(columns, width, passing) if whole else None) or row_tiling(
            columns, width, wide, wide + vectors * max(1, width // 4), self.tuning, together
        )


def pairs_halves(program: Program) -> bool:
    """Tells whether the program rotates pairs of elements that lie half a row apart."""
    return any("rotate_half(" in text for text in (*program.steps, *program.rows))


def demands(program: Program, s: Signature, step: int) -> tuple[int, int, int]:
    """Elements per packet; how many 16 bytes one packet of every operand takes; numbers kept per element.

    All places of rows are multiples of `step` elements.
    """
    eights = program.rotates or any(d.itemsize == 2 for d in _stored(program, s))
    width = gcd(step, 8 if eights else 4)
    loads = sum(max(1, d.itemsize * width // 16) for _, d in s.rows)
    return width, loads, sum(s.startswith(("row ", "rotate")) for s in program.steps)


def _stored(program: Program, s: Signature) -> list[DType]:
    return [d for _, d in (*s.rows, *s.single, *s.tables)] + list(s.outputs[: len(program.rows)])


def _places(lead: Shape, columns: int, arrays: Sequence[Array]) -> tuple[Shape, tuple[Strides, ...]]:
    """Returns the leading dims, merged into as few as possible, and each array's strides along them, in elements."""
    if prod(lead) == 1:
        return (1,), ((columns,),) * len(arrays)
    return merged(lead, [[s // a.itemsize for s in a.strides[:-1]] for a in arrays])


def _step(columns: int, strides: Sequence[Strides], arrays: Sequence[Array]) -> int:
    """Returns the largest number of elements of which the length and all places of rows are multiples."""
    return gcd(columns, *((a.data.ptr & 15) // a.itemsize for a in arrays), *(s for row in strides for s in row))


def _signature(
    operands: Operands, rows: Mapping[str, Array], tables: Mapping[str, Array], made: Sequence[Array], dims: int
) -> Signature:
    single, several = by_count(operands.tables)
    first: dict[tuple[int, int], str] = {}
    return Signature(
        names_of(rows),
        names_of({n: tables[n] for n in single}),
        names_of({n: tables[n] for n in several}),
        tuple(first.setdefault((t.run, t.count), n) for n, t in several.items()),
        names_of(operands.columns),
        tuple(operands.numbers),
        tuple(a.dtype for a in made),
        dims,
    )


def _arguments(
    operands: Operands,
    rows: Mapping[str, Array],
    tables: Mapping[str, Array],
    made: Sequence[Array],
    strides: Sequence[Strides],
) -> list[Any]:
    single, several = by_count(operands.tables)
    found = [a for x, steps in zip(rows.values(), strides, strict=False) for a in (x, *map(np.int64, steps))]
    found += [tables[n] for n in (*single, *several)]
    for run, count in dict.fromkeys((t.run, t.count) for t in several.values()):
        found += [*divisor(run), *divisor(count)]
    found += [*operands.columns.values(), *(np.float32(v) for v in operands.numbers.values()), *made]
    return [*found, *(np.int64(s) for steps in strides[len(rows) :] for s in steps)]


def by_count(tables: Mapping[str, Table]) -> tuple[dict[str, Table], dict[str, Table]]:
    """Returns the tables with a single row, and those with several."""
    return {n: t for n, t in tables.items() if t.count == 1}, {n: t for n, t in tables.items() if t.count > 1}


def names_of(arrays: Mapping[str, Array]) -> Names:
    return tuple((n, a.dtype) for n, a in arrays.items())


@lru_cache(maxsize=4096)
def divisor(by: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """Returns the arguments of `Divisor` in dtypes.cuh, which divides by `by` with a multiplication and a shift."""
    shift = (by - 1).bit_length()
    return np.uint32(by), np.uint32(((1 << 32) * ((1 << shift) - by)) // by + 1), np.uint32(shift)
