"""What squares from the mean add up to, in one pass over memory: each thread's running mean, then all means merged.

Contract of the generated kernels: the operand is dense; arithmetic is fp32, in an order that the sizes alone decide, by
Welford's and Chan's formulas, so that nothing cancels; outputs are assigned, never accumulated. A first kernel leaves
count, mean and squares of each stretch of the reduced dim, a second one merges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from ...dtype import Array, DType, float32
from .nvrtc import KernelModules, element_name

_THREADS = 256


class Moments:
    """Compiles and launches them."""

    def __init__(self, cupy: Any, modules: KernelModules, multiprocessors: int) -> None:
        self._xp, self._modules, self._blocks = cupy, modules, 4 * multiprocessors

    def __call__(self, x: Array, result: str, numbers: Mapping[str, float], dtype: DType) -> Array:
        """`result`, an expression over `total` and `n`, for squares over the middle dim of (outer, reduced, inner)."""
        outer, reduced, inner = x.shape
        part = self._stretches(x)
        across = _power(inner, 32)
        tiles = -(-inner // across)
        made = self._xp.empty((outer, inner), dtype)
        sizes = [np.int32(part.shape[2]), np.int32(inner), np.int32(tiles), np.float32(reduced)]
        self._modules.generated(_second(result, tuple(numbers), dtype, across), "moments")(
            (outer * tiles,), (_THREADS,), (part, *(np.float32(v) for v in numbers.values()), made, *sizes)
        )
        return made

    def _stretches(self, x: Array) -> Array:
        """(count, mean and squares, outer, stretches, inner); an inner dim of one is made of columns laid together."""
        outer, reduced, inner = x.shape
        along = reduced if inner == 1 else inner
        width = gcd(along, 8 if x.itemsize == 2 else 4, (x.data.ptr & 15) // x.itemsize)
        across = 8 if inner == 1 else _power(-(-inner // width), 8)
        columns = across * width if inner == 1 else inner
        rows, tiles = -(-reduced * inner // columns), -(-columns // (across * width))
        wanted = max(1, self._blocks // (tiles * outer))
        stretch = max(-(-rows // wanted), 4 * _THREADS // across)
        count = -(-rows // stretch)
        part = self._xp.empty((3, outer, count, inner), float32)
        self._modules.generated(_first(x.dtype, width, across, inner == 1), "moments")(
            (outer * tiles, count), (_THREADS,),
            (x, part, np.int64(reduced * inner), np.int64(stretch), np.int32(columns), np.int32(tiles)),
        )  # fmt: skip
        return part


def _power(n: int, most: int) -> int:
    """The least power of two that is not below n, up to `most`."""
    return min(most, 1 << (n - 1).bit_length())


# ---- the texts -----------------------------------------------------------------------------------------------------

_MOMENT = """
struct Moment {
  float n, mean, squares;
  __device__ __forceinline__ void add(const Moment& o) {
    const float all = n + o.n, share = all > 0.f ? __fdividef(o.n, all) : 0.f, d = o.mean - mean;
    mean += d * share;
    squares += o.squares + d * d * n * share;
    n = all;
  }
};
"""


def _first(dtype: DType, width: int, across: int, together: bool) -> str:
    """grid (outer and tiles, stretches): `across` threads side by side, the others of a block further down."""
    lanes, kept, t = _THREADS // across, 1 if together else across * width, element_name(dtype)
    packet = f"Packet<{t}, {width}>"
    return f"""#define FAST 1
#include "elements.cuh"
{_MOMENT}
extern "C" __global__ void __launch_bounds__({_THREADS}) moments(const {t}* __restrict__ p, float* __restrict__ part,
    const long long size, const long long stretch, const int columns, const int tiles) {{
  const int x = threadIdx.x % {across}, y = threadIdx.x / {across};
  const int outer = blockIdx.x / tiles, tile = blockIdx.x % tiles, c = (tile * {across} + x) * {width};
  const long long first = blockIdx.y * stretch, rows = c < columns ? (size - c + columns - 1) / columns : 0;
  const long long last = first + stretch < rows ? first + stretch : rows;
  float n = 0.f, mean[{width}] = {{}}, squares[{width}] = {{}};
#pragma unroll 4
  for (long long row = first + y; row < last; row += {lanes}) {{
    const {packet} q = *reinterpret_cast<const {packet}*>(p + outer * size + row * columns + c);
    n += 1.f;
    const float share = __fdividef(1.f, n);
#pragma unroll
    for (int i = 0; i < {width}; i++) {{
      const float v = to_float(q.e[i]), d = v - mean[i];
      mean[i] += d * share;
      squares[i] += d * (v - mean[i]);
    }}
  }}
  __shared__ Moment all[{_THREADS * width}];
#pragma unroll
  for (int i = 0; i < {width}; i++) all[(y * {width} + i) * {across} + x] = {{n, mean[i], squares[i]}};
{_merged(_THREADS * width, kept)}
  const int inner = {"1" if together else "columns"};
  const long long all_parts = (long long)gridDim.x / tiles * gridDim.y * inner;
  float* const own = part + (outer * (long long)gridDim.y + blockIdx.y) * inner;
  for (int t = threadIdx.x; t < {kept}; t += {_THREADS}) {{
    const int column = (tile * {across} + t % {across}) * {width} + t / {across};
    if (column >= inner) continue;
    own[column] = all[t].n;
    own[all_parts + column] = all[t].mean;
    own[2 * all_parts + column] = all[t].squares;
  }}
}}
"""


def _second(result: str, numbers: Sequence[str], dtype: DType, across: int) -> str:
    """grid (outer and tiles): `across` threads side by side, the others of a block at later stretches."""
    given = "".join(f"const float {name}, " for name in numbers)
    return f"""#define FAST 1
#include "elements.cuh"
{_MOMENT}
extern "C" __global__ void __launch_bounds__({_THREADS}) moments(const float* __restrict__ part,
    {given}{element_name(dtype)}* __restrict__ made, const int count, const int inner, const int tiles,
    const float n) {{
  const int x = threadIdx.x % {across}, y = threadIdx.x / {across};
  const int outer = blockIdx.x / tiles, column = blockIdx.x % tiles * {across} + x;
  const long long size = (long long)gridDim.x / tiles * count * inner;
  Moment own = {{0.f, 0.f, 0.f}};
  if (column < inner)
#pragma unroll 4
  for (int s = y; s < count; s += {_THREADS // across}) {{
    const float* const at = part + (outer * (long long)count + s) * inner + column;
    own.add({{at[0], at[size], at[2 * size]}});
  }}
  __shared__ Moment all[{_THREADS}];
  all[threadIdx.x] = own;
{_merged(_THREADS, across)}
  const float total = all[x].squares;
  if (y == 0 && column < inner) from_float({result}, made[outer * (long long)inner + column]);
}}
"""


def _merged(entries: int, kept: int) -> str:
    """The first `kept` of a block's entries made what all that lie at multiples of it behind them are together."""
    return f"""  for (int half = {entries // 2}; half >= {kept}; half /= 2) {{
    __syncthreads();
    for (int t = threadIdx.x; t < half; t += {_THREADS}) all[t].add(all[t + half]);
  }}
  __syncthreads();"""
