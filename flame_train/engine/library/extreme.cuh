// The largest value along the middle dim of (outer, n, inner), or the smallest, and the first place that has it. NaN comes
// before all numbers.
//
// Contract: x is dense, and 16-byte aligned where WIDTH is above 1, which divides n where inner is 1, else inner. n is
// below 2^31. index and values are (outer, inner); values may be null. A block has a stretch of the places, the y-th
// `stretch` of them, a multiple of WIDTH. Where there are several, each leaves what it found in part and at, and the
// last to finish takes the best. The counters are zero before and after. What is found does not depend on the order.
#pragma once
#include "backend/cuda/codegen/column_reduce.cuh"

__device__ __forceinline__ bool beats(float a, float b) {
  return (LARGEST ? a > b : a < b) || (a != a && b == b);
}

struct Best {
  float value = LARGEST ? -INFINITE : INFINITE;
  int at = 0x7fffffff;
  // One more value, of a place behind all before.
  __device__ __forceinline__ void take(float v, int place) {
    if (beats(v, value)) value = v, at = place;
  }
  __device__ __forceinline__ void join(float v, int place) {
    if (beats(v, value) || (!beats(value, v) && place < at)) value = v, at = place;
  }
  __device__ __forceinline__ void leave(long long to, long long* index, T* values) const {
    index[to] = at;
    if (values) from_float(value, values[to]);
  }
};

// ---- inner is 1: THREADS to a row, or 256 to a stretch of it ---------------------------------------------------------

// The best of all threads of a row, for the first of them.
__device__ __forceinline__ Best of_threads(Best own) {
  __shared__ float values[8];
  __shared__ int places[8];
#pragma unroll
  for (int o = (THREADS < 32 ? THREADS : 32) / 2; o; o >>= 1) {
    const float v = __shfl_xor_sync(0xffffffffu, own.value, o);
    own.join(v, (int)__shfl_xor_sync(0xffffffffu, (unsigned)own.at, o));
  }
  if (THREADS <= 32) return own;
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = own.value, places[threadIdx.x / 32] = own.at;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++) own.join(values[w], places[w]);
  __syncthreads();
  return own;
}

// Grid (rows, stretches).
extern "C" __global__ void __launch_bounds__(256) extreme_of_rows(
    const T* __restrict__ x, long long* __restrict__ index, T* __restrict__ values, float* part, int* at,
    unsigned* counters, const long long outer, const int n, const int stretch) {
  const long long row = blockIdx.x * (256ll / THREADS) + threadIdx.x / THREADS;
  const int first = blockIdx.y * stretch, last = row < outer ? (n - first < stretch ? n : first + stretch) : 0;
  const int begin = first + threadIdx.x % THREADS * WIDTH;
  x += row * n;
  Best own;
  if (begin < last) own.at = begin;  // which is right where no value beats the least
#pragma unroll 4
  for (int p = begin; p < last; p += THREADS * WIDTH) {
    const auto q = *reinterpret_cast<const Packet<T, WIDTH>*>(x + p);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) own.take(to_float(q.e[i]), p + i);
  }
  own = of_threads(own);
  if (gridDim.y > 1) {
    const long long mine = row * gridDim.y;
    if (threadIdx.x == 0) part[mine + blockIdx.y] = own.value, at[mine + blockIdx.y] = own.at;
    if (!last_of(counters + row, gridDim.y)) return;
    own = Best();
    for (unsigned s = threadIdx.x; s < gridDim.y; s += 256) own.join(part[mine + s], at[mine + s]);
    own = of_threads(own);
  }
  if (row < outer && threadIdx.x % THREADS == 0) own.leave(row, index, values);
}

// ---- other inner: a block has ACROSS packets side by side, and LANES places at once -----------------------------------

// Grid (outer, stretches, tiles of columns).
extern "C" __global__ void __launch_bounds__(ACROSS* LANES) extreme_of_columns(
    const T* __restrict__ x, long long* __restrict__ index, T* __restrict__ values, float* part, int* at,
    unsigned* counters, const int n, const int stretch, const int inner) {
  constexpr int COLUMNS = ACROSS * WIDTH;
  __shared__ float found[LANES][COLUMNS];
  __shared__ int places[LANES][COLUMNS];
  const int side = threadIdx.x % ACROSS, lane = threadIdx.x / ACROSS, c = (blockIdx.z * ACROSS + side) * WIDTH;
  const int first = blockIdx.y * stretch, last = n - first < stretch ? n : first + stretch;
  Best own[WIDTH];
  if (c < inner) {
    x += (long long)blockIdx.x * n * inner + c;
    if (first + lane < last)
#pragma unroll
      for (int i = 0; i < WIDTH; i++) own[i].at = first + lane;
#pragma unroll 4
    for (int p = first + lane; p < last; p += LANES) {
      const auto q = *reinterpret_cast<const Packet<T, WIDTH>*>(x + (long long)p * inner);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) own[i].take(to_float(q.e[i]), p);
    }
  }
#pragma unroll
  for (int i = 0; i < WIDTH; i++)
    found[lane][side * WIDTH + i] = own[i].value, places[lane][side * WIDTH + i] = own[i].at;
  __syncthreads();
  const int column = threadIdx.x, whole = blockIdx.z * COLUMNS + column;
  Best best;
  if (column < COLUMNS)
    for (int l = 0; l < LANES; l++) best.join(found[l][column], places[l][column]);
  if (gridDim.y > 1) {
    const long long tile = blockIdx.x * (long long)gridDim.z + blockIdx.z, mine = tile * gridDim.y * COLUMNS + column;
    if (column < COLUMNS) part[mine + blockIdx.y * COLUMNS] = best.value, at[mine + blockIdx.y * COLUMNS] = best.at;
    if (!last_of(counters + tile, gridDim.y)) return;
    best = Best();
    if (column < COLUMNS)
      for (unsigned s = 0; s < gridDim.y; s++) best.join(part[mine + s * COLUMNS], at[mine + s * COLUMNS]);
  }
  if (column < COLUMNS && whole < inner) best.leave((long long)blockIdx.x * inner + whole, index, values);
}
