"""The text of a kernel that goes through rows by a program and sums down them: see `row_sums.py`."""

from __future__ import annotations

from collections.abc import Sequence

from ..nvrtc import begin
from .kernel_ir import Program
from .row_codegen import RowText, Signature, group_reductions
from .row_tiling import RowSumsTiling


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
        """The whole text. Grid (blocks, groups of `run` rows)."""
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
        """A thread's last packet beyond the row. In place of a missing row, the last one is read once more."""
        return "" if self.whole else f"    if (k == {self.tiling.packets - 1} && p >= packets) continue;\n"
