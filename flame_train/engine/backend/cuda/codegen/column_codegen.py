"""The text of a reduction's kernel: how a block reads its rows, and what the last block does with all totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....dtype import DType
from ..nvrtc import begin, element_name
from .kernel_ir import Reduction
from .row_codegen import Names, divided, divisor_arguments, header_of

_THREADS = 512

_RESIDENT = 1024  # threads of a multiprocessor: with four packets loading each, three times what hides latency

_LINE = 128  # bytes of a row that a block reads at once

_LEAST = 4  # rows to a thread

_AHEAD = 4  # packets that a thread asks for at once


@dataclass(frozen=True, slots=True)
class ColumnTiling:
    """Elements per packet, threads side by side, threads one below the other."""

    width: int
    across: int
    lanes: int

    @property
    def threads(self) -> int:
        """Threads to a block."""
        return self.across * self.lanes

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor is to hold at once, which limits a kernel's registers."""
        return _RESIDENT // self.threads

    @property
    def columns(self) -> int:
        """Columns to a block."""
        return self.across * self.width

    def ahead(self, operands: int) -> int:
        """Rows whose packets, for that many operands, are loaded before the first is used."""
        return max(1, _AHEAD // operands)

    def tiles(self, inner: int) -> int:
        """Blocks side by side."""
        return -(-inner // self.columns)

    def stretch(self, reduced: int, places: int, multiprocessors: int) -> int:
        """Rows to a block, where there are `places` (outputs' tiles) among which all resident blocks are divided."""
        share = max(1, multiprocessors * self.resident // places)
        return max(-(-reduced // share), _LEAST * self.lanes)


def column_tiling(inner: int, reduced: int, width: int, itemsize: int) -> ColumnTiling:
    """Returns the tiling for `reduced` rows of `inner` elements of `itemsize` bytes, `width` to a packet.

    A block has whole warps, and at least a thread for each of its columns.
    """
    across = min(_power(-(-inner // width)), max(8, min(32, _LINE // (width * itemsize))))
    lanes = min(_THREADS // across, _power(-(-reduced // _LEAST)))
    return ColumnTiling(width, across, max(lanes, width, 32 // across))


def _power(n: int) -> int:
    """Returns the least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a kernel reads: names and dtypes of rows, tables with a `single` row and with several, columns; numbers."""

    rows: Names
    single: Names = ()
    tables: Names = ()
    columns: Names = ()
    numbers: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Returns the kernel's declarations of them."""
        found = [f"const {element_name(d)}* __restrict__ p_{n}" for n, d in (*self.rows, *self.single)]
        for n, d in self.tables:
            found += [f"const {element_name(d)}* __restrict__ p_{n}"]
            found += [*divisor_arguments(f"run_{n}"), *divisor_arguments(f"count_{n}")]
        found += [f"const {element_name(d)}* __restrict__ p_{n}" for n, d in self.columns]
        return [*found, *(f"const float {n}" for n in self.numbers)]

    def begin(self) -> str:
        """Returns the first lines of the kernel's text."""
        narrow = all(d.itemsize <= 2 for _, d in (*self.rows, *self.single, *self.tables))
        return begin(narrow) + '#include "backend/cuda/codegen/column_reduce.cuh"\n'


STRETCH_THREADS = 512

SHARED = "float* part, unsigned* counters, const long long reduced, const long long stretch"
"""The arguments of kernels whose blocks may share a reduction; `part` is null where none do."""


def rows_read(inputs: Inputs, tiling: ColumnTiling, each: str) -> str:
    """Returns the loop over a thread's rows, in batches whose packets are all loaded before the first is used.

    `each` is the text for one row, in which q_NAME are the packets and NAME the values of columns. Around the loop, `x`
    and `y` are the thread's place in the block, `c` its first column, `first` and `last` the block's rows.
    """
    ahead, lanes, w = tiling.ahead(len(inputs.rows)), tiling.lanes, tiling.width
    held, reads, own, once = [], [], [], []
    for n, d in (*inputs.rows, *inputs.single, *inputs.tables):
        packet = f"Packet<{element_name(d)}, {w}>"
        row = {**dict.fromkeys(dict(inputs.rows), "row"), **{t: _table_row(t) for t, _ in inputs.tables}}.get(n, "0ll")
        read = f"*reinterpret_cast<const {packet}*>(p_{n} + {row} * inner + c);"
        if (n, d) in inputs.single:
            once.append(f"const {packet} q_{n} = {read}")
            continue
        held.append(f"{packet} a_{n}[{ahead}];")
        reads.append(f"a_{n}[k] = {read}")
        own.append(f"const {packet} q_{n} = a_{n}[k];")
    for n, _ in inputs.columns:
        held.append(f"float a_{n}[{ahead}];")
        reads.append(f"a_{n}[k] = to_float(p_{n}[row]);")
        own.append(f"const float {n} = a_{n}[k];")
    line = "\n      "
    return f"""  if (c < inner) {{
    {line.join(once)}
    for (long long at = first + y; at < last; at += {ahead * lanes}) {{
      {line.join(held)}
#pragma unroll
      for (int k = 0; k < {ahead}; k++) {{
        const long long row = blockIdx.x * reduced + at + k * {lanes};
        if (at + k * {lanes} < last) {{ {" ".join(reads)} }}
      }}
#pragma unroll
      for (int k = 0; k < {ahead}; k++) {{
        if (at + k * {lanes} >= last) break;
        {line.join(own)}
        {each}
      }}
    }}
  }}
"""


def _table_row(name: str) -> str:
    return f"(long long){divided(f'count_{name}')}.rest({divided(f'run_{name}')}.quotient((unsigned)row))"


def place_of(tiling: ColumnTiling) -> str:
    """Lines that compute a thread's place in the block, its first column, the block's rows, and the tile's index."""
    return f"""  const int x = threadIdx.x % {tiling.across}, y = threadIdx.x / {tiling.across};
  const int c = (blockIdx.z * {tiling.across} + x) * {tiling.width};
  const long long first = blockIdx.y * stretch, last = first + stretch < reduced ? first + stretch : reduced;
  const long long place = blockIdx.x * (long long)gridDim.z + blockIdx.z;
"""


def column_source(rs: Sequence[Reduction], inputs: Inputs, dtype: DType, tiling: ColumnTiling) -> str:
    """The kernel down columns. Grid (outer, stretches, tiles); the last block of a tile combines all blocks' totals."""
    w, t, columns, left = tiling.width, tiling.threads, tiling.columns, f"Left<{tiling.columns}, {tiling.threads}>"
    step = len(rs) * columns
    names = [f"const float {n} = to_float(q_{n}.e[i]);" for n, _ in (*inputs.rows, *inputs.single, *inputs.tables)]
    none, each, block, shared, results = "", " ".join(names), "", "", ""
    for j, r in enumerate(rs):
        how = r.how.capitalize()
        none += f"own[{j}][i] = {how}::none(); "
        each += f" own[{j}][i] = {how}::of(own[{j}][i], {r.value});"
        block += f"  totals[{j}] = of_columns<{how}, {tiling.across}, {w}, {t}>(own[{j}]);\n"
        shared += f"    totals[{j}] = of_blocks<{how}, {columns}, {t}>(left + {j * columns}, gridDim.y, {step});\n"
        place = f"made[({j}ll * gridDim.x + blockIdx.x) * inner + column]"
        results += f"  {{ const float total = totals[{j}]; from_float({r.result}, {place}); }}\n"
    loop = f"#pragma unroll\n        for (int i = 0; i < {w}; i++) {{ {each} }}"
    return f"""{inputs.begin()}{header_of(r.how for r in rs)}
extern "C" __global__ void __launch_bounds__({t}, {tiling.resident}) columns({", ".join(inputs.arguments())},
    {element_name(dtype)}* __restrict__ made, {SHARED}, const int inner, const float n) {{
{place_of(tiling)}  float own[{len(rs)}][{w}], totals[{len(rs)}];
#pragma unroll
  for (int i = 0; i < {w}; i++) {{ {none}}}
{rows_read(inputs, tiling, loop)}{block}  int column = column_of<{tiling.across}, {w}>(threadIdx.x);
  if (gridDim.y > 1) {{
    float* const left = part + place * gridDim.y * {step};
    if (threadIdx.x < {columns})
      for (int j = 0; j < {len(rs)}; j++) left[blockIdx.y * {step} + j * {columns} + column] = totals[j];
    if (!last_of(counters + place, gridDim.y)) return;
{shared}    column = column_of<{left}::ACROSS, {left}::WIDTH>(threadIdx.x);
  }}
  column += blockIdx.z * {columns};
  if (threadIdx.x >= {columns} || column >= inner) return;
{results}}}
"""


def stretch_source(r: Reduction, inputs: Inputs, dtype: DType, width: int) -> str:
    """The kernel along rows. Grid (rows, stretches): a block has a stretch of a row, and its last, odd elements."""
    how, t = r.how.capitalize(), STRETCH_THREADS
    reads, each, lone = "", "", ""
    for n, d in inputs.rows:
        packet = f"Packet<{element_name(d)}, {width}>"
        reads += f"const {packet} q_{n} = *reinterpret_cast<const {packet}*>(p_{n} + base + at); "
        each += f"const float {n} = to_float(q_{n}.e[i]); "
        lone += f"const float {n} = to_float(p_{n}[base + at]); "
    single = " ".join(f"const float {n} = to_float(p_{n}[blockIdx.x]);" for n, _ in inputs.columns)
    return f"""{inputs.begin()}{header_of((r.how,))}
extern "C" __global__ void __launch_bounds__({t}, 2) stretches({", ".join(inputs.arguments())},
    {element_name(dtype)}* __restrict__ made, {SHARED}, const float n) {{
  const long long base = blockIdx.x * reduced, first = blockIdx.y * stretch;
  const long long last = first + stretch < reduced ? first + stretch : reduced;
  const long long whole = first + (last - first) / {width} * {width};
  {single}
  float own[1] = {{{how}::none()}};
#pragma unroll 4
  for (long long at = first + threadIdx.x * {width}; at < whole; at += {t * width}) {{
    {reads}
#pragma unroll
    for (int i = 0; i < {width}; i++) {{ {each}own[0] = {how}::of(own[0], {r.value}); }}
  }}
  if (threadIdx.x < last - whole) {{
    const long long at = whole + threadIdx.x;
    {lone}
    own[0] = {how}::of(own[0], {r.value});
  }}
  float total = of_columns<{how}, 1, 1, {t}>(own);
  if (gridDim.y > 1) {{
    float* const left = part + blockIdx.x * (long long)gridDim.y;
    if (threadIdx.x == 0) left[blockIdx.y] = total;
    if (!last_of(counters + blockIdx.x, gridDim.y)) return;
    total = of_blocks<{how}, 1, {t}>(left, gridDim.y, 1);
  }}
  if (threadIdx.x == 0) from_float({r.result}, made[blockIdx.x]);
}}
"""
