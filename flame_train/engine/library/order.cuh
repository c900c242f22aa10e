// The first few of a row's values in falling or rising order, equal ones in theirs, and values put back where they stood.
// NaN counts as larger than every number.
#pragma once

// Contract of topk: x is dense (rows, n), 16-byte aligned where WIDTH is above 1, which divides n; values and index are
// (rows, wanted). A block has a row, a thread every THREADS-th packet. `wanted` is at most THREADS, and times the
// elements of a thread at most HELD. What is found does not depend on the order in which threads come.

constexpr int HELD = 4096;  // places that fit into shared memory
typedef unsigned long long Ranked;

// A value and its place as one number, no two alike: the larger it is, the earlier it comes. Never 0.
__device__ __forceinline__ unsigned rank_of(float x) {
  const unsigned bits = __float_as_uint(x), u = bits << 1 ? bits : 0u;  // by bits: comparisons take tiny numbers for 0
  const unsigned key = x != x ? ~0u : u >> 31 ? ~u : u | 0x80000000u;
  return LARGEST ? key : ~key;
}
__device__ __forceinline__ Ranked ranked(unsigned rank, int place) { return (Ranked)rank << 32 | ~(unsigned)place; }

// `count` numbers, a power of two, in falling order, by the block: a bitonic sort.
__device__ __forceinline__ void sort_down(Ranked* numbers, int count) {
  for (int run = 2; run <= count; run *= 2)
    for (int apart = run / 2; apart; apart /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < count / 2; i += THREADS) {
        const int a = i / apart * 2 * apart + i % apart, b = a + apart;
        const Ranked low = min(numbers[a], numbers[b]), high = max(numbers[a], numbers[b]);
        const bool falling = !(a & run);
        numbers[a] = falling ? high : low, numbers[b] = falling ? low : high;
      }
    }
  __syncthreads();
}

// Each of the `wanted` first threads, by their best elements, has an element no worse than the last of these bests. So all
// that is wanted is no worse, and such elements are few: those are kept and sorted.
extern "C" __global__ void __launch_bounds__(THREADS) topk(
    const T* __restrict__ x, T* __restrict__ values, long long* __restrict__ index, const int n, const int wanted) {
  __shared__ Ranked kept[HELD];
  __shared__ unsigned count;
  x += blockIdx.x * (long long)n;
  unsigned best = 0;
  int place = -1;
#pragma unroll 4
  for (int p = threadIdx.x * WIDTH; p < n; p += THREADS * WIDTH) {
    const auto q = *reinterpret_cast<const Packet<T, WIDTH>*>(x + p);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const unsigned rank = rank_of(to_float(q.e[i]));
      if (rank > best || place < 0) best = rank, place = p + i;
    }
  }
  kept[threadIdx.x] = place < 0 ? 0 : ranked(best, place);
  sort_down(kept, THREADS);
  const Ranked least = kept[wanted - 1];
  __syncthreads();
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
#pragma unroll 4
  for (int p = threadIdx.x * WIDTH; p < n; p += THREADS * WIDTH) {
    const auto q = *reinterpret_cast<const Packet<T, WIDTH>*>(x + p);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const Ranked found = ranked(rank_of(to_float(q.e[i])), p + i);
      if (found >= least) kept[atomicAdd(&count, 1u)] = found;
    }
  }
  __syncthreads();
  int padded = 1;
  while (padded < count) padded *= 2;
  for (int i = count + threadIdx.x; i < padded; i += THREADS) kept[i] = 0;
  sort_down(kept, padded);
  for (int i = threadIdx.x; i < wanted; i += THREADS) {
    const int from = (int)~(unsigned)kept[i];
    const long long to = blockIdx.x * (long long)wanted + i;
    values[to] = x[from], index[to] = from;
  }
}

// out[o, index[o, j, i], i] = g[o, j, i], of arrays (outer, count, inner) and out (outer, rows, inner), all dense. No
// element of out is named twice.
extern "C" __global__ void __launch_bounds__(256) placed(
    const T* __restrict__ g, const long long* __restrict__ index, T* __restrict__ out, const long long size,
    const int rows, const int count, const int inner) {
  const long long at = blockIdx.x * 256ll + threadIdx.x;
  if (at >= size) return;
  out[(at / inner / count * rows + index[at]) * inner + at % inner] = g[at];
}
