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
from ..nvrtc import KernelModules, begin
from .column_reduce import Columns
from .kernel_ir import Extent, Operands, Program, Reduction
from .row_codegen import RowText, Signature, group_reductions
from .row_tiling import RowSumsTiling, row_sums_tiling
from .rows import Rows, demands, pairs_halves


class RowTotalsText(RowText):
    """Writes that kernel.

    Args:
        program: what is computed of each row.
        totals: the expressions to sum.
        signature: dtypes and shapes of operands and outputs.
        tiling: how rows are divided among threads.
        columns: elements of a row.
    """

    tiling: RowSumsTiling

    def __init__(
        self, program: Program, totals: Sequence[str], signature: Signature, tiling: RowSumsTiling, columns: int
    ) -> None:
        super().__init__(program, signature, tiling, columns)
        self._sums = totals

    def source(self) -> str:
        """Returns the whole text. Grid (blocks, groups of `run` rows)."""
        steps = "".join(map(self._step, group_reductions(self.program.steps)))
        sums = [f"own[{j}][k][i] += {self._expression(text)};" for j, text in enumerate(self._sums)]
        c, types, count = self.tiling, [*self.rows.values(), *self.tables.values(), *self.made.values()], len(sums)
        return f"""{begin("float" not in types)}#include "backend/cuda/codegen/row_sums.cuh"
extern "C" __global__ void __launch_bounds__({c.block}, {c.resident}) rows({", ".join(self._arguments())},
    float* __restrict__ part, const unsigned run) {{
  const int lane = threadIdx.x % {c.threads};
  const int length = {c.elements if self.whole else "columns"}, packets = length / {c.width};
  const unsigned before = blockIdx.y * run;
  const float n = length;
  __shared__ float exchanged[2][{max(1, self.totals)}][32];
  float own[{count}][{c.packets}][{c.width}] = {{}};
  for (unsigned first = blockIdx.x * {c.rows}, turn = 0; first < run; first += gridDim.x * {c.rows}, turn ^= 1) {{
  const unsigned here = first + threadIdx.x / {c.threads};
  const bool live = here < run;
  const unsigned row = before + (live ? here : run - 1);
  float (*const shared)[32] = exchanged[turn];  // what was exchanged for the row before may still be read
{self._places()}{self._loads()}{steps}  if (live) {{
{self._outputs()}{self._each(" ".join(sums))}  }}
  }}
  const long long place = (blockIdx.y * (long long)gridDim.x + blockIdx.x) * {count} * length;
  over_rows<{c.threads}, {c.rows}>(own, packets, part + place);
}}
"""

    def _left_out(self) -> str:
        """Returns a thread's last packet beyond the row. In place of a missing row, the last one is read once more."""
        return "" if self.whole else f"    if (k == {self.tiling.packets - 1} && p >= packets) continue;\n"


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
        """Returns the program's outputs, and for each expression of `totals` its sums (groups, C) over the rows.

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
