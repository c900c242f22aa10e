// Totals of columns over the rows that a block went through, from the registers of its threads.
//
// Contract: the block is ROWS times THREADS threads, whole warps. Thread t has, for N totals, PACKETS packets of WIDTH
// neighbouring columns: packet k of it is the row's packet t % THREADS + k THREADS, of which there are `packets`, at
// least (PACKETS - 1) THREADS + 1. The order of sums follows from these numbers alone.
#pragma once

// Assigns to `to`, 16-byte aligned if WIDTH is 4 or more, the N totals of each column, one total after another.
template <int THREADS, int ROWS, int N, int PACKETS, int WIDTH>
__device__ __forceinline__ void over_rows(float (&own)[N][PACKETS][WIDTH], int packets, float* to) {
  constexpr int APART = THREADS < 32 ? 32 : THREADS, PARTS = THREADS * ROWS / APART;
  __shared__ float handed[PARTS > 1 ? PARTS / 2 : 1][N * PACKETS * WIDTH][THREADS];
  const int lane = threadIdx.x % THREADS, part = threadIdx.x / APART;
  const bool first = threadIdx.x % APART < THREADS;  // of the threads of a warp that know the same
  const auto each = [&](auto use) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int k = 0; k < PACKETS; k++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++) use(own[j][k][i], (j * PACKETS + k) * WIDTH + i);
  };
#pragma unroll
  for (int o = 16; o >= THREADS; o >>= 1) each([&](float& v, int) { v += __shfl_xor_sync(0xffffffffu, v, o); });
  // The upper half of the parts hands what it has to the lower half, until one is left.
  for (int parts = PARTS, half; parts > 1; parts = half) {
    half = (parts + 1) / 2;
    if (first && part >= half && part < parts) each([&](float& v, int e) { handed[part - half][e][lane] = v; });
    __syncthreads();
    if (first && part < parts - half) each([&](float& v, int e) { v += handed[part][e][lane]; });
    __syncthreads();
  }
  if (!first || part) return;
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int k = 0; k < PACKETS; k++) {
      const int p = lane + k * THREADS;
      if (p < packets) store<float, WIDTH>(to + ((long long)j * packets + p) * WIDTH, own[j][k]);
    }
}
