// Running sums along the middle dim of (outer, n, inner), from its first place or, with BACK, from its last.
//
// Contract: x and y are dense and 16-byte aligned where WIDTH is above 1, which divides n where inner is 1, else inner.
// Places are counted from where the sums begin. A stretch of them, `stretch` long (a multiple of WIDTH), is a block's or
// a thread's own. Where there are `count` of them, above 1, `totals` (outer, count, inner) has the sum of each, which
// the kernels `..._totals` write before. Sums are fp32, in an order that the sizes alone decide. What rounding loses is
// carried from packet to packet and from stretch to stretch, so that errors do not grow with n.
#pragma once
#include "backend/cuda/codegen/block_sum.cuh"

struct Carry {
  float sum = 0.f, lost = 0.f;
  __device__ __forceinline__ void add(float v) {
    const float s = sum + v, own = s - sum, rest = (sum - (s - own)) + (v - own);  // Knuth's exact error of a sum
    lost += fabsf(rest) < INFINITE ? rest : 0.f;
    sum = s;
  }
};

// The packet, of a row of n places, whose first place is `place`: its elements in the order of places.
__device__ __forceinline__ long long packet_at(long long place, long long n) { return BACK ? n - place - WIDTH : place; }
__device__ __forceinline__ constexpr int element(int i) { return BACK ? WIDTH - 1 - i : i; }

// ---- inner is 1: THREADS to a row, or 256 to a stretch of it ---------------------------------------------------------

// The sum over the threads of the row before this one, and over all; for every thread of the block.
struct Sums {
  float before, all;
  __device__ __forceinline__ Sums(float own) {
    __shared__ float warps[8];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const float lower = __shfl_up_sync(0xffffffffu, own, o);
      if (lane >= o) own = lower + own;
    }
    before = __shfl_up_sync(0xffffffffu, own, 1);
    if (lane == 0) before = 0.f;
    all = __shfl_sync(0xffffffffu, own, 31);
    if (THREADS == 32) return;
    __syncthreads();  // the sums of the packets before have been read
    if (lane == 31) warps[threadIdx.x / 32] = own;
    __syncthreads();
    float lower = all = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) {
      if (w == threadIdx.x / 32) lower = all;
      all += warps[w];
    }
    before = lower + before;
  }
};

// Grid (rows, stretches). Each thread asks for its next packet before it waits for the others.
extern "C" __global__ void __launch_bounds__(256) running_rows(
    const T* __restrict__ x, const float* __restrict__ totals, T* __restrict__ y, const long long outer, const long long n,
    const long long stretch) {
  const long long row = blockIdx.x * (256ll / THREADS) + threadIdx.x / THREADS;
  const long long first = blockIdx.y * stretch, end = min(first + stretch, n), last = row < outer ? end : 0;
  x += row * n, y += row * n;
  Carry carry;
  for (unsigned s = 0; s < blockIdx.y; s++) carry.add(totals[row * gridDim.y + s]);
  Packet<T, WIDTH> next;
  const auto read = [&](long long place) {
    if (place < last) next = *reinterpret_cast<const Packet<T, WIDTH>*>(x + packet_at(place, n));
  };
  long long place = first + threadIdx.x % THREADS * WIDTH;
  read(place);
  for (long long at = first; at < end; at += THREADS * WIDTH, place += THREADS * WIDTH) {
    float own[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      own[i] = place < last ? to_float(next.e[element(i)]) : 0.f;
      if (i) own[i] += own[i - 1];
    }
    read(place + THREADS * WIDTH);
    const Sums others(own[WIDTH - 1]);
    float made[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) made[element(i)] = carry.sum + (carry.lost + (others.before + own[i]));
    if (place < last) store<T, WIDTH>(y + packet_at(place, n), made);
    carry.add(others.all);
  }
}

extern "C" __global__ void __launch_bounds__(256) row_totals(
    const T* __restrict__ x, float* __restrict__ totals, const long long n, const long long stretch) {
  const long long first = blockIdx.y * stretch, end = min(first + stretch, n);
  Carry carry;
#pragma unroll 4
  for (long long place = first + threadIdx.x * WIDTH; place < end; place += 256 * WIDTH) {
    const auto q = *reinterpret_cast<const Packet<T, WIDTH>*>(x + blockIdx.x * n + packet_at(place, n));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum += to_float(q.e[i]);
    carry.add(sum);
  }
  const double sum = block_sum<256>((double)carry.sum + carry.lost);
  if (threadIdx.x == 0) totals[blockIdx.x * (long long)gridDim.y + blockIdx.y] = (float)sum;
}

// ---- other inner: a thread a stretch of as many lines as a packet has elements ----------------------------------------

struct Lines {
  long long outer, column, part;  // part: of the stretches
  bool live;
  __device__ __forceinline__ Lines(long long size, int count, int inner) {
    const long long thread = blockIdx.x * 256ll + threadIdx.x;
    const int packets = inner / WIDTH;
    column = thread % packets * WIDTH, part = thread / packets % count, outer = thread / packets / count;
    live = thread < size;
  }
  // Hands `use` the packet of each place of the stretch, and where that is in memory.
  template <class Use> __device__ __forceinline__ void each(const T* x, long long n, long long stretch, int inner, Use use) {
    const long long end = min((part + 1) * stretch, n);
#pragma unroll 4
    for (long long place = part * stretch; place < end; place++) {
      const long long at = (outer * n + (BACK ? n - 1 - place : place)) * inner + column;
      use(*reinterpret_cast<const Packet<T, WIDTH>*>(x + at), at);
    }
  }
};

extern "C" __global__ void __launch_bounds__(256) running_lines(
    const T* __restrict__ x, const float* __restrict__ totals, T* __restrict__ y, const long long size, const long long n,
    const long long stretch, const int count, const int inner) {
  Lines lines(size, count, inner);
  if (!lines.live) return;
  Carry carry[WIDTH];
  for (int s = 0; s < lines.part; s++) {
    const float* const from = totals + (lines.outer * count + s) * inner + lines.column;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) carry[i].add(from[i]);
  }
  lines.each(x, n, stretch, inner, [&](const Packet<T, WIDTH>& q, long long at) {
    float made[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) carry[i].add(to_float(q.e[i])), made[i] = carry[i].sum + carry[i].lost;
    store<T, WIDTH>(y + at, made);
  });
}

extern "C" __global__ void __launch_bounds__(256) line_totals(
    const T* __restrict__ x, float* __restrict__ totals, const long long size, const long long n, const long long stretch,
    const int count, const int inner) {
  Lines lines(size, count, inner);
  if (!lines.live) return;
  Carry carry[WIDTH];
  lines.each(x, n, stretch, inner, [&](const Packet<T, WIDTH>& q, long long) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) carry[i].add(to_float(q.e[i]));
  });
  float* const to = totals + (lines.outer * count + lines.part) * inner + lines.column;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) to[i] = carry[i].sum + carry[i].lost;
}
