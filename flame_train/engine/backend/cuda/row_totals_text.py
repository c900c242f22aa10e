"""The text of a kernel that goes through rows by a program and sums down them: see `row_totals.py`."""

from __future__ import annotations

from collections.abc import Sequence

from .programs import Program
from .row_cuts import TotalsCut
from .row_text import RowText, Signature, together


class RowTotalsText(RowText):
    """Writes that kernel. While a row is worked on, a thread's packets of its next row are on their way."""

    cut: TotalsCut

    def __init__(
        self, program: Program, totals: Sequence[str], signature: Signature, cut: TotalsCut, columns: int
    ) -> None:
        super().__init__(program, signature, cut, columns)
        self._sums = totals
        self._numbers = [n for n, _ in signature.columns]

    def source(self) -> str:
        """The whole text. Grid (blocks, groups of `run` rows)."""
        c, types, names = self.cut, [*self.rows.values(), *self.tables.values(), *self.made.values()], self._read()
        row, sums = self._row(), len(self._sums)
        return f"""#define FAST {int("float" not in types)}
#include "elements.cuh"
#include "row_totals.cuh"
extern "C" __global__ void __launch_bounds__({c.block}, {c.resident}) rows({", ".join(self._arguments())},
    float* __restrict__ part, const unsigned run) {{
  const int lane = threadIdx.x % {c.threads};
  const int length = {c.elements if self.whole else "columns"}, packets = length / {c.width};
  const unsigned last = (blockIdx.y + 1) * run, stride = gridDim.x * {c.rows};
  const float n = length;
  __shared__ float exchanged[2][{max(1, self.totals)}][32];
  float own[{sums}][{c.packets}][{c.width}] = {{}};
{self._reader()}{self._room("q")}  unsigned row = blockIdx.y * run + blockIdx.x * {c.rows} + threadIdx.x / {c.threads};
  read(row, {_each("q", names)});
  for (unsigned at = blockIdx.x * {c.rows}, turn = 0; at < run; at += stride, turn ^= 1) {{
  const bool live = row < last;
  float (*const shared)[32] = exchanged[turn];  // what was exchanged for the row before may still be read
{self._room("next")}  read(row + stride, {_each("next", names)});
{row}{self._moved()}  row += stride;
  }}
  const long long place = (blockIdx.y * (long long)gridDim.x + blockIdx.x) * {sums} * length;
  over_rows<{c.threads}, {c.rows}>(own, packets, part + place);
}}
"""

    def _read(self) -> list[str]:
        """What is read of a row, by name: packets of its operands, and the numbers that it has of its own."""
        return [*self.rows, *self._numbers]

    def _room(self, prefix: str) -> str:
        return self._held(prefix) + "".join(f"  float {prefix}_{n} = 0.f;\n" for n in self._numbers)

    def _reader(self) -> str:
        """The function by which a thread reads its part of a row, if there is such a row."""
        given = [f"Packet<{t}, {self.cut.width}>* to_{n}" for n, t in self.rows.items()]
        given += [f"float& to_{n}" for n in self._numbers]
        numbers = "".join(f"    to_{n} = to_float(p_{n}[row]);\n" for n in self._numbers)
        return f"""  auto read = [&](const unsigned row, {", ".join(given)}) {{
  const bool live = row < last;
  if (!live) return;
{self._indices()}{self._packets(self._reads("to"))}{numbers}  }};
"""

    def _row(self) -> str:
        """What is done with a row: the program, and then each element added to the thread's totals."""
        steps = "".join(map(self._step, together(self.program.steps)))
        own = "".join(f"  const float {n} = q_{n};\n" for n in self._numbers)
        sums = [f"own[{j}][k][i] += {self._expression(text)};" for j, text in enumerate(self._sums)]
        return f"{self._indices()}{self._tables()}{own}{steps}{self._outputs()}{self._each(' '.join(sums))}"

    def _moved(self) -> str:
        """The next row becomes the current one."""
        packets = " ".join(f"q_{n}[k] = next_{n}[k];" for n in self.rows)
        numbers = "".join(f"  q_{n} = next_{n};\n" for n in self._numbers)
        return f"#pragma unroll\n  for (int k = 0; k < {self.cut.packets}; k++) {{ {packets} }}\n{numbers}"


def _each(prefix: str, names: Sequence[str]) -> str:
    return ", ".join(f"{prefix}_{n}" for n in names)
