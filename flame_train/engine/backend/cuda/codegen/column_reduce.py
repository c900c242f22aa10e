"""Sums, products and extremes over the middle dim of (outer, reduced, inner): one pass over memory, in one launch.

One expression over the operands is reduced, a second one is applied to the total. Contract of the generated
kernels: operands are dense, rows fewer than 2^31; arithmetic is fp32, in an order that the sizes alone decide; outputs
are assigned, never accumulated. Where several blocks share a reduction, each leaves its totals in memory, and the last
one to finish combines them: a second kernel would cost as much time as reading 10 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np

from ....dtype import Array, DType, float32
from ..nvrtc import KernelModules
from .column_codegen import STRETCH_THREADS, ColumnTiling, Inputs, column_source, column_tiling, stretch_source
from .kernel_ir import Extent, Operands, Program, Reduction, Table
from .rows import Rows, by_count, divisor, names_of

_LONGEST = 8192
"""Elements of a row that is reduced in one block's registers."""


class Columns:
    """Compiles and launches reductions."""

    def __init__(self, cupy: Any, modules: KernelModules, rows: Rows, multiprocessors: int) -> None:
        self._xp, self._modules, self._rows, self._multiprocessors = cupy, modules, rows, multiprocessors
        # Kernels leave them at zero. All reductions are on one stream, so no two kernels use them at once.
        self.counters = cupy.zeros(2 * multiprocessors, np.uint32)
        self._function = lru_cache(maxsize=1024)(self._compiled)

    def __call__(
        self, reductions: Sequence[Reduction], operands: Operands, extent: Extent, dtype: DType
    ) -> list[Array]:
        """Returns an array (outer, inner) of `dtype` for each reduction.

        Rows of `operands` are (outer * reduced, inner), or (outer, reduced) where inner is 1; its tables and columns
        refer to the same rows.
        """
        if extent.inner > 1:
            return self._down_columns(tuple(reductions), operands, extent, dtype)
        along = self._along_rows if extent.reduced <= _LONGEST else self._in_stretches
        return [along(r, operands, extent, dtype).reshape(extent.outer, 1) for r in reductions]

    # ---- rows ----------------------------------------------------------------------------------------

    def _along_rows(self, r: Reduction, operands: Operands, e: Extent, dtype: DType) -> Array:
        program = Program((f"{r.how} total = {r.value}",), (), (r.result,))
        return self._rows(program, operands, (dtype,))[0]

    def _in_stretches(self, r: Reduction, operands: Operands, e: Extent, dtype: DType) -> Array:
        rows = {n: self._xp.ascontiguousarray(a) for n, a in operands.rows.items()}
        width = _width(rows, {}, e.reduced if e.outer > 1 else 0, 16)
        # As many stretches as fill the GPU, none shorter than a block's sixteen packets.
        wanted, unit = -(-2 * self._multiprocessors // e.outer), max(8, width)
        stretch = -(-max(-(-e.reduced // wanted), STRETCH_THREADS * 16) // unit) * unit
        count = -(-e.reduced // stretch)
        inputs = Inputs(names_of(rows), columns=names_of(operands.columns), numbers=tuple(operands.numbers))
        made = self._xp.empty((e.outer,), dtype)
        numbers = [np.float32(v) for v in operands.numbers.values()]
        self._modules.generated(stretch_source(r, inputs, dtype, width), "stretches")(
            (e.outer, count),
            (STRETCH_THREADS,),
            (
                *rows.values(),
                *operands.columns.values(),
                *numbers,
                made,
                *self.shared(e.outer, count, 1),
                np.int64(e.reduced),
                np.int64(stretch),
                np.float32(e.reduced),
            ),
        )
        return made

    def shared(self, places: int, count: int, values: int) -> tuple[Array | np.intp, Array]:
        """Memory for `values` totals of each of `count` blocks that share a place, and counters of finished blocks."""
        part = self._xp.empty((places * count * values,), float32) if count > 1 else np.intp(0)
        return part, self.counters

    # ---- columns -------------------------------------------------------------------------------------

    def _down_columns(self, rs: tuple[Reduction, ...], operands: Operands, e: Extent, dtype: DType) -> list[Array]:
        rows = {n: self._xp.ascontiguousarray(a) for n, a in operands.rows.items()}
        single, several = by_count(operands.tables)
        width = _width(rows, operands.tables, e.inner, 8 if len(rs) < 3 else 4)
        tiling = column_tiling(e.inner, e.reduced, width, min(a.dtype.itemsize for a in rows.values()))
        tiles = tiling.tiles(e.inner)
        stretch = tiling.stretch(e.reduced, tiles * e.outer, self._multiprocessors)
        count = -(-e.reduced // stretch)
        made = self._xp.empty((len(rs), e.outer, e.inner), dtype)
        inputs = Inputs(
            names_of(rows),
            names_of({n: t.array for n, t in single.items()}),
            names_of({n: t.array for n, t in several.items()}),
            names_of(operands.columns),
            tuple(operands.numbers),
        )
        arguments: list[Any] = [*rows.values(), *(t.array for t in single.values())]
        for t in several.values():
            arguments += [t.array, *divisor(t.run), *divisor(t.count)]
        arguments += [*operands.columns.values(), *(np.float32(v) for v in operands.numbers.values()), made]
        arguments += self.shared(tiles * e.outer, count, len(rs) * tiling.columns)
        arguments += [np.int64(e.reduced), np.int64(stretch), np.int32(e.inner), np.float32(e.reduced)]
        self._function(rs, inputs, dtype, tiling)((e.outer, count, tiles), (tiling.threads,), tuple(arguments))
        return [*made]

    def _compiled(self, rs: tuple[Reduction, ...], inputs: Inputs, dtype: DType, tiling: ColumnTiling) -> Any:
        return self._modules.generated(column_source(rs, inputs, dtype, tiling), "columns")


def _width(rows: Mapping[str, Array], tables: Mapping[str, Table], length: int, most: int) -> int:
    """Elements per packet, at most `most`, for rows of `length`; 1 unless all operands are 16-byte aligned."""
    if any(a.data.ptr & 15 for a in (*rows.values(), *(t.array for t in tables.values()))):
        return 1
    sizes = {a.dtype.itemsize for a in rows.values()}
    return gcd(length, min(most, 16 if sizes == {1} else 8 if 2 in sizes else 4))
