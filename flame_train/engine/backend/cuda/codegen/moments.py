"""Sums of squared differences from the mean, in one pass over memory, for variances and standard deviations.

Each thread keeps a running mean and sum of squares by Welford's formula. Means and sums of threads and blocks are then
merged relative to the overall mean, so that nothing cancels. Contract of the generated kernels: the operand is dense;
arithmetic is fp32, in an order that the sizes alone decide; outputs are assigned, never accumulated. Each block leaves
mean and squares of its rows in memory, and the last one to finish merges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from ....dtype import Array, DType, float32
from ..nvrtc import KernelModules, element_name
from .column_codegen import SHARED, ColumnTiling, Inputs, column_tiling, place_of, rows_read
from .column_reduce import Columns


class Moments:
    """Compiles and launches these kernels."""

    def __init__(self, cupy: Any, modules: KernelModules, columns: Columns, multiprocessors: int) -> None:
        self._xp, self._modules, self._columns, self._multiprocessors = cupy, modules, columns, multiprocessors

    def __call__(self, x: Array, result: str, numbers: Mapping[str, float], dtype: DType) -> tuple[Array, Array]:
        """(outer, inner): the expression `result` over `total`, the sum of squares over the middle dim of x, and `n`.

        x is (outer, reduced, inner), `n` is reduced; `numbers` are further names of the expression. The second
        result is the means, in fp32.
        """
        outer, reduced, inner = x.shape
        made, means = self._xp.empty((outer, inner), dtype), self._xp.empty((outer, inner), float32)
        width = gcd(
            reduced * inner if inner == 1 else inner, 8 if x.itemsize == 2 else 4, (x.data.ptr & 15) // x.itemsize
        )
        together = inner == 1
        if together:  # a row is read as `width` columns, whose moments are merged into one
            reduced, inner = reduced // width, width
        tiling = column_tiling(inner, reduced, width, x.itemsize)
        tiles = tiling.tiles(inner)
        stretch = tiling.stretch(reduced, tiles * outer, self._multiprocessors)
        count = -(-reduced // stretch)
        shared = self._columns.shared(tiles * outer, count, 2 * (1 if together else tiling.columns))
        text = _source(x.dtype, result, tuple(numbers), dtype, tiling, together)
        self._modules.generated(text, "moments")(
            (outer, count, tiles),
            (tiling.threads,),
            (
                x,
                *(np.float32(v) for v in numbers.values()),
                made,
                means,
                *shared,
                np.int64(reduced),
                np.int64(stretch),
                np.int32(inner),
                np.float32(x.shape[1]),
            ),
        )
        return made, means


def _source(
    stored: DType, result: str, numbers: Sequence[str], dtype: DType, tiling: ColumnTiling, together: bool
) -> str:
    """The kernel. Grid (outer, stretches, tiles), as in columns; where `together`, a block's columns are one result."""
    inputs, w, t = Inputs((("x", stored),), numbers=tuple(numbers)), tiling.width, tiling.threads
    across, width, parts = (1, 1, w) if together else (tiling.across, w, 1)
    columns, step, inner = across * width, 2 * across * width, "1" if together else "inner"
    return f"""{inputs.begin()}#include "backend/cuda/codegen/moments.cuh"
extern "C" __global__ void __launch_bounds__({t}, {tiling.resident}) moments({", ".join(inputs.arguments())},
    {element_name(dtype)}* __restrict__ made, float* __restrict__ means, {SHARED}, const int inner, const float n) {{
{place_of(tiling)}  Running<{w}> own;
{rows_read(inputs, tiling, "own.add(q_x);")}  auto each = [&](auto use) {{
#pragma unroll
    for (int i = 0; i < {parts}; i++) use(own.count, own.mean + i, own.squares + i);
  }};
  Moment all = merged<{across}, {width}, {t}>((last - first) * {parts}, each);
  int column = column_of<{across}, {width}>(threadIdx.x);
  if (gridDim.y > 1) {{
    float* const left = part + place * gridDim.y * {step};
    if (threadIdx.x < {columns}) {{
      left[blockIdx.y * {step} + column] = all.mean;
      left[blockIdx.y * {step} + {columns} + column] = all.squares;
    }}
    if (!last_of(counters + place, gridDim.y)) return;
    using L = Left<{columns}, {t}>;
    all = merged<L::ACROSS, L::WIDTH, {t}>(n, [&](auto use) {{
      L::template each<2>(left, gridDim.y, {step}, [&](const Packet<float, L::WIDTH>* q, int block) {{
        const long long rest = reduced - block * stretch;
        use((rest < stretch ? rest : stretch) * {parts}, q[0].e, q[1].e);
      }});
    }});
    column = column_of<L::ACROSS, L::WIDTH>(threadIdx.x);
  }}
  column += blockIdx.z * {columns};
  if (threadIdx.x >= {columns} || column >= {inner}) return;
  const float total = all.squares;
  const long long at = blockIdx.x * (long long){inner} + column;
  from_float({result}, made[at]);
  means[at] = all.mean;
}}
"""
