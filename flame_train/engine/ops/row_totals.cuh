// Totals of columns over the rows that a block went through, from the registers of its threads.
//
// Contract: the block is ROWS times THREADS threads, whole warps. Thread t has, for N totals, PACKETS packets of WIDTH
// neighbouring columns: packet k of it is the row's packet t % THREADS + k THREADS, of which there are `packets`, at
// least (PACKETS - 1) THREADS + 1. The order of sums follows from these numbers alone.
#pragma once

// Assigns to `to` the N totals of each column, one after another.
template <int THREADS, int ROWS, int N, int PACKETS, int WIDTH>
__device__ __forceinline__ void over_rows(float (&own)[N][PACKETS][WIDTH], int packets, float* to) {
  constexpr int BESIDE = THREADS < 32 ? 32 : THREADS, PARTS = THREADS * ROWS / BESIDE;
  __shared__ float sums[N][PARTS > 1 ? THREADS * PACKETS * WIDTH : 1];
  const int lane = threadIdx.x % THREADS;
#pragma unroll
  for (int o = 16; o >= THREADS; o >>= 1)
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int k = 0; k < PACKETS; k++)
#pragma unroll
        for (int i = 0; i < WIDTH; i++) own[j][k][i] += __shfl_xor_sync(0xffffffffu, own[j][k][i], o);
  // One part of the block after another adds its own, the last to what it then hands out.
#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    if (threadIdx.x / BESIDE == part && threadIdx.x % BESIDE < THREADS)
#pragma unroll
      for (int j = 0; j < N; j++)
#pragma unroll
        for (int k = 0; k < PACKETS; k++) {
          const int p = lane + k * THREADS;
          if (k == PACKETS - 1 && p >= packets) break;
#pragma unroll
          for (int i = 0; i < WIDTH; i++) {
            float* const sum = PARTS > 1 ? &sums[j][p * WIDTH + i] : nullptr;
            const float total = part ? *sum + own[j][k][i] : own[j][k][i];
            if (part < PARTS - 1) *sum = total;
            else to[((long long)j * packets + p) * WIDTH + i] = total;
          }
        }
    __syncthreads();
  }
}
