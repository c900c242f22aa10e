"""Sums, maxima and minima over the middle dim of (outer, reduced, inner): one pass, in two stages where it is long.

An expression says what of the operands is taken together, a second what becomes of the total. Contract of the generated
kernels: operands are dense and 16-byte aligned; arithmetic is fp32, in an order that the sizes alone decide; outputs
are assigned, never accumulated. A first stage leaves one fp32 value for each of several stretches of the reduced dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np

from ...dtype import Array, DType, float32
from .nvrtc import KernelModules, element_name
from .programs import Extent, Operands, Program, Reduction
from .row_text import Names
from .rows import Rows

_THREADS = 256
_LONGEST = 8192
"""Elements of a row that is reduced in one stage."""


class Columns:
    """Compiles and launches reductions."""

    def __init__(self, cupy: Any, modules: KernelModules, rows: Rows, multiprocessors: int) -> None:
        self._xp, self._modules, self._rows = cupy, modules, rows
        self._blocks = 4 * multiprocessors
        self._function = lru_cache(maxsize=1024)(self._compiled)

    def __call__(
        self, reductions: Sequence[Reduction], operands: Operands, extent: Extent, dtype: DType
    ) -> list[Array]:
        """An array (outer, inner) for each reduction.

        Rows of `operands` are (outer * reduced, inner), or (outer, reduced) where inner is 1; tables and columns count
        the same rows.
        """
        if extent.inner == 1:
            return [self._along_rows(r, operands, extent, dtype) for r in reductions]
        return self._down_columns(tuple(reductions), operands, extent, dtype)

    # ---- rows ----------------------------------------------------------------------------------------

    def _along_rows(self, r: Reduction, operands: Operands, e: Extent, dtype: DType) -> Array:
        if e.reduced > _LONGEST:
            part = self._stretches(r, operands, e)
            operands, r = Operands({"part": part}, numbers={**operands.numbers, "whole": e.reduced}), _second(r)
        program = Program((f"{r.how} total = {r.value}",), (), (r.result,))
        return self._rows(program, operands, (dtype,))[0].reshape(e.outer, 1)

    def _stretch(self, e: Extent) -> int:
        """Elements to a stretch: enough stretches to fill the GPU, none shorter than a block's sixteen packets."""
        wanted = -(-self._blocks // e.outer)
        return -(-max(-(-e.reduced // wanted), _THREADS * 16) // 8) * 8

    def _stretches(self, r: Reduction, operands: Operands, e: Extent) -> Array:
        rows = {n: self._xp.ascontiguousarray(a) for n, a in operands.rows.items()}
        stretch = self._stretch(e)
        count = -(-e.reduced // stretch)
        part = self._xp.empty((e.outer, count), float32)
        even = e.reduced if e.outer > 1 else 0
        offsets = [a.data.ptr & 15 for a in rows.values()]
        width = 1 if any(offsets) else gcd(even, 8 if any(a.dtype.itemsize == 2 for a in rows.values()) else 4)
        names = tuple((n, a.dtype) for n, a in rows.items())
        text = _stretch_source(r, names, tuple(operands.columns), tuple(operands.numbers), width)
        numbers = [np.float32(v) for v in operands.numbers.values()]
        single = [a.astype(float32, copy=False) for a in operands.columns.values()]
        self._modules.generated(text, "stretches")(
            (e.outer, count), (_THREADS,),
            (*rows.values(), *single, *numbers, part, np.int64(e.reduced), np.int64(stretch)),
        )  # fmt: skip
        return part

    # ---- columns -------------------------------------------------------------------------------------

    def _down_columns(
        self, rs: tuple[Reduction, ...], operands: Operands, e: Extent, dtype: DType, last: bool = False
    ) -> list[Array]:
        rows = {n: self._xp.ascontiguousarray(a) for n, a in operands.rows.items()}
        offsets = [a.data.ptr & 15 for a in (*rows.values(), *(t.array for t in operands.tables.values()))]
        limit = 8 if any(a.dtype.itemsize == 2 for a in rows.values()) and len(rs) < 3 else 4
        width = 1 if any(offsets) else gcd(e.inner, limit)
        across = _across(-(-e.inner // width), 8 if last else 32)
        tiles = -(-e.inner // (width * across))
        lanes = _THREADS // across
        stretch = max(-(-e.reduced // max(1, self._blocks // (tiles * e.outer))), 4 * lanes)
        count = 1 if last else -(-e.reduced // stretch)
        stretch = e.reduced if last else stretch
        made = self._xp.empty((len(rs), e.outer, count, e.inner), float32 if count > 1 else dtype)
        names, tables, columns, numbers = (
            tuple((n, a.dtype) for n, a in rows.items()),
            tuple((n, t.array.dtype) for n, t in operands.tables.items()),
            tuple((n, a.dtype) for n, a in operands.columns.items()),
            tuple(operands.numbers),
        )
        here = rs if count == 1 else tuple(Reduction(r.how, r.value) for r in rs)
        function = self._function(here, names, tables, columns, numbers, made.dtype, width, across)
        arguments: list[Any] = [*rows.values()]
        for t in operands.tables.values():
            arguments += [t.array, np.int32(t.run), np.int32(t.count)]
        arguments += [*operands.columns.values(), *(np.float32(v) for v in operands.numbers.values()), made]
        arguments += [np.int64(e.reduced), np.int64(stretch), np.int32(e.inner), np.float32(e.reduced)]
        function((e.outer, count, tiles), (_THREADS,), tuple(arguments))
        if count == 1:
            return [made[i, :, 0] for i in range(len(rs))]
        return self._finished(rs, made, e, operands.numbers, dtype)

    def _finished(
        self, rs: tuple[Reduction, ...], part: Array, e: Extent, numbers: Mapping[str, float], dtype: DType
    ) -> list[Array]:
        """The second stage: the stretches' totals taken together, of all reductions that end alike in one launch."""
        ends = [_second(r) for r in rs]
        found: list[Array] = []
        for end, some in zip(ends, [part] if len({*ends}) == 1 else part[:, None], strict=False):
            operands = Operands({"part": some.reshape(-1, e.inner)}, numbers={**numbers, "whole": e.reduced})
            whole = Extent(len(some) * e.outer, some.shape[2], e.inner)
            found += [*self._down_columns((end,), operands, whole, dtype, True)[0].reshape(-1, e.outer, e.inner)]
        return found

    def _compiled(
        self, rs: tuple[Reduction, ...], rows: Names, tables: Names, columns: Names, numbers: tuple[str, ...],
        dtype: DType, width: int, across: int,
    ) -> Any:  # fmt: skip
        return self._modules.generated(
            _column_source(rs, rows, tables, columns, numbers, dtype, width, across), "columns"
        )


def _across(packets: int, most: int) -> int:
    """Threads side by side: of the powers of two up to `most`, the one that leaves the fewest without a packet."""
    enough = min(most, 1 << (packets - 1).bit_length())
    return min((a for a in (32, 16, 8, 4, 2, 1) if enough >= a >= min(8, enough)), key=lambda a: (-packets % a, -a))


def _second(r: Reduction) -> Reduction:
    """The stage that takes `part`, the first one's totals, together; `whole` is then the count."""
    return Reduction(r.how, "part", re.sub(r"\bn\b", "whole", r.result))


# ---- the texts -----------------------------------------------------------------------------------------------------


def _stretch_source(
    r: Reduction, rows: Names, columns: tuple[str, ...], numbers: tuple[str, ...], width: int
) -> str:  # fmt: skip
    """grid (rows, stretches): each block a stretch of a row; elements after the last whole packet go to its end."""
    how = r.how.capitalize()
    arguments = [
        *(f"const {element_name(d)}* __restrict__ p_{n}" for n, d in rows),
        *(f"const float* __restrict__ p_{n}" for n in columns), *(f"const float {n}" for n in numbers),
        "float* __restrict__ part", "const long long reduced", "const long long stretch",
    ]  # fmt: skip
    packet = {n: f"Packet<{element_name(d)}, {width}>" for n, d in rows}
    reads = " ".join(
        f"const {packet[n]} q_{n} = *reinterpret_cast<const {packet[n]}*>(p_{n} + base + at);" for n, _ in rows
    )
    each = " ".join(f"const float {n} = to_float(q_{n}.e[i]);" for n, _ in rows)
    lone = " ".join(f"const float {n} = to_float(p_{n}[base + at]);" for n, _ in rows)
    single = " ".join(f"const float {n} = p_{n}[blockIdx.x];" for n in columns)
    return f"""#define FAST {int(all(d.itemsize == 2 for _, d in rows))}
#include "elements.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS}) stretches({", ".join(arguments)}) {{
  const long long base = blockIdx.x * reduced, first = blockIdx.y * stretch;
  const long long last = first + stretch < reduced ? first + stretch : reduced;
  const long long whole = first + (last - first) / {width} * {width};
  {single}
  float own = {how}::none();
#pragma unroll 4
  for (long long at = first + threadIdx.x * {width}; at < whole; at += {_THREADS * width}) {{
    {reads}
#pragma unroll
    for (int i = 0; i < {width}; i++) {{ {each} own = {how}::of(own, {r.value}); }}
  }}
  if (threadIdx.x < last - whole) {{
    const long long at = whole + threadIdx.x;
    {lone}
    own = {how}::of(own, {r.value});
  }}
  __shared__ float shared[32];
  own = of_all<{how}, {_THREADS}>(own, shared);
  if (threadIdx.x == 0) part[(long long)blockIdx.x * gridDim.y + blockIdx.y] = own;
}}
"""


def _column_source(
    rs: Sequence[Reduction], rows: Names, tables: Names, columns: Names, numbers: Sequence[str], dtype: DType,
    width: int, across: int,
) -> str:  # fmt: skip
    """grid (outer, stretches, tiles): `across` threads side by side, the others of a block further down."""
    lanes, out = _THREADS // across, element_name(dtype)
    arguments = [f"const {element_name(d)}* __restrict__ p_{n}" for n, d in rows]
    for n, d in tables:
        arguments += [f"const {element_name(d)}* __restrict__ p_{n}", f"const int run_{n}", f"const int count_{n}"]
    arguments += [f"const {element_name(d)}* __restrict__ p_{n}" for n, d in columns]
    arguments += [*(f"const float {n}" for n in numbers), f"{out}* __restrict__ made", "const long long reduced"]
    arguments += ["const long long stretch", "const int inner", "const float n"]
    packet = {n: f"Packet<{element_name(d)}, {width}>" for n, d in (*rows, *tables)}
    reads = [
        f"const {packet[n]} q_{n} = *reinterpret_cast<const {packet[n]}*>(p_{n} + row * inner + c);" for n, _ in rows
    ]
    reads += [
        f"const {packet[n]} q_{n} = *reinterpret_cast<const {packet[n]}*>"
        f"(p_{n} + row / run_{n} % count_{n} * inner + c);"
        for n, _ in tables
    ]
    reads += [f"const float {n} = to_float(p_{n}[row]);" for n, _ in columns]
    each = [f"const float {n} = to_float(q_{n}.e[i]);" for n, _ in (*rows, *tables)]
    sums = [f"own[{j}][i] = {r.how.capitalize()}::of(own[{j}][i], {r.value});" for j, r in enumerate(rs)]
    last = "".join(_finish(j, r, lanes, across, width) for j, r in enumerate(rs))
    none = " ".join(f"own[{j}][i] = {r.how.capitalize()}::none();" for j, r in enumerate(rs))
    newline = "\n    "
    return f"""#define FAST {int(all(d.itemsize <= 2 for _, d in (*rows, *tables)))}
#include "elements.cuh"
extern "C" __global__ void __launch_bounds__({_THREADS}) columns({", ".join(arguments)}) {{
  const int x = threadIdx.x % {across}, y = threadIdx.x / {across};
  const int c = (blockIdx.z * {across} + x) * {width};
  const bool live = c < inner;
  const long long first = blockIdx.y * stretch, last = first + stretch < reduced ? first + stretch : reduced;
  float own[{len(rs)}][{width}];
#pragma unroll
  for (int i = 0; i < {width}; i++) {{ {none} }}
  if (live)
#pragma unroll 4
  for (long long at = first + y; at < last; at += {lanes}) {{
    const long long row = blockIdx.x * reduced + at;
    {newline.join(reads)}
#pragma unroll
    for (int i = 0; i < {width}; i++) {{ {" ".join(each)} {" ".join(sums)} }}
  }}
  __shared__ float shared[{lanes}][{across * width + 1}];
{last}}}
"""


def _finish(j: int, r: Reduction, lanes: int, across: int, width: int) -> str:
    """The block's rows of threads taken together, always from the first to the last, and written."""
    how = r.how.capitalize()
    return f"""  __syncthreads();
#pragma unroll
  for (int i = 0; i < {width}; i++) shared[y][x + i * {across}] = own[{j}][i];
  __syncthreads();
  for (int t = threadIdx.x; t < {across * width}; t += {_THREADS}) {{
    float total = shared[0][t];
    for (int k = 1; k < {lanes}; k++) total = {how}::of(total, shared[k][t]);
    const int column = (blockIdx.z * {across} + t % {across}) * {width} + t / {across};
    const long long place = ({j} * (long long)gridDim.x + blockIdx.x) * gridDim.y + blockIdx.y;
    if (column < inner) from_float({r.result}, made[place * inner + column]);
  }}
"""
