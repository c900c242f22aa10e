"""Row programs that also sum down the rows: a norm's gradient together with those of its weight and bias.

Each operand is read once for both. Blocks go through many rows and keep their totals of columns in registers. Each
leaves them in memory, where a reduction down columns adds them up. Contract of the generated kernels: as for row
programs (`rows.py`), with one thing more. All sums are in an order that the sizes and the number of multiprocessors
decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np

from ....dtype import Array, DType, float32
from ..nvrtc import KernelModules
from .column_reduce import Columns
from .kernel_ir import Extent, Operands, Program, Reduction
from .row_codegen import Signature
from .row_sums_codegen import RowTotalsText
from .row_tiling import RowSumsTiling, row_sums_tiling
from .rows import Rows, demands, pairs_halves


class RowSums:
    """Compiles and launches such programs.

    Args:
        cupy: the module.
        modules: compiles kernels.
        rows: prepares the row programs.
        columns: adds up what blocks leave.
        multiprocessors: those of the GPU.
    """

    def __init__(self, cupy: Any, modules: KernelModules, rows: Rows, columns: Columns, multiprocessors: int) -> None:
        self._xp, self._modules, self._rows, self._columns = cupy, modules, rows, columns
        self._multiprocessors = multiprocessors
        self._function = lru_cache(maxsize=1024)(self._compiled)

    def __call__(
        self,
        program: Program,
        totals: Sequence[str],
        operands: Operands,
        dtypes: Sequence[DType],
        out: Sequence[Array] = (),
        groups: int = 1,
        summed: DType = float32,
    ) -> tuple[tuple[Array, ...], list[Array]]:
        """The program's outputs, and for each expression of `totals` its sums (groups, C) over the rows.

        The rows are that many `groups` of equal length, one after another. Expressions of totals use what those of the
        program's outputs may. Sums are of the dtype `summed`, or in fp32 where one block makes them.

        Args:
            program: what is computed of each row.
            totals: expressions to sum.
            operands: what both read.
            dtypes: the outputs' dtypes.
            out: arrays for the outputs, or none.
            groups: how many groups of rows have sums of their own.
            summed: the sums' dtype.

        Returns:
            The outputs, and the sums.
        """
        call = self._rows.prepared(program, operands, dtypes, out)
        run = call.count // groups
        function, tiling = self._function(program, tuple(totals), call.signature, call.columns, call.step)
        most = max(1, self._multiprocessors * tiling.resident // groups)
        blocks = min(-(-run // tiling.rows), most)
        part = self._xp.empty((groups * blocks, len(totals) * call.columns), float32)
        sizes = (np.uint32(call.count), np.uint32(call.columns))
        function((blocks, groups), (tiling.block,), (*call.arguments, *sizes, part, np.uint32(run)))
        if blocks > 1:
            extent = Extent(groups, blocks, part.shape[1])
            part = self._columns([Reduction("sum", "part")], Operands({"part": part}), extent, summed)[0]
        each = part.reshape(groups, len(totals), call.columns)
        return call.made, [each[:, i] for i in range(len(totals))]

    def _compiled(
        self, program: Program, totals: tuple[str, ...], s: Signature, columns: int, step: int
    ) -> tuple[Any, RowSumsTiling]:
        halves = pairs_halves(program)
        width, loads, vectors = demands(program, s, gcd(step, columns // 2) if halves else step)
        tiling = row_sums_tiling(columns, width, loads, len(totals), vectors, self._rows.tuning, halves)
        return self._modules.generated(RowTotalsText(program, totals, s, tiling, columns).source(), "rows"), tiling
