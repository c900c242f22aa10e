// The gradient of a row's product: for each element the product of all others, exact where factors are zero.
//
// Contract: x and dx are dense (rows, n), and 16-byte aligned where WIDTH is above 1, which divides n; g is (rows,). A row
// has THREADS threads, 32 or 256, each with up to PACKETS packets in registers. Arithmetic is fp32.
#pragma once

// The product of all threads' values of a row but this one's. No division: a zero would leave nothing to divide by.
__device__ __forceinline__ float of_others(float own) {
  __shared__ float warps[8];
  float others = 1.f;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {  // of the groups of o threads, the neighbour's product is one of the others'
    const float theirs = __shfl_xor_sync(0xffffffffu, own, o);
    others *= theirs, own *= theirs;
  }
  if (THREADS == 32) return others;
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; w++)
    if (w != threadIdx.x / 32) others *= warps[w];
  return others;
}

extern "C" __global__ void __launch_bounds__(256) product_gradient(
    const T* __restrict__ x, const T* __restrict__ g, T* __restrict__ dx, const long long rows, const int n) {
  const long long row = blockIdx.x * (256ll / THREADS) + threadIdx.x / THREADS;
  const int first = threadIdx.x % THREADS * WIDTH, last = row < rows ? n : 0;
  x += row * n, dx += row * n;
  Packet<T, WIDTH> q[PACKETS];
  float before[PACKETS][WIDTH], own = 1.f;
#pragma unroll
  for (int k = 0; k < PACKETS; k++)
    if (first + k * THREADS * WIDTH < last) q[k] = *reinterpret_cast<const Packet<T, WIDTH>*>(x + first + k * THREADS * WIDTH);
#pragma unroll
  for (int k = 0; k < PACKETS; k++)
    if (first + k * THREADS * WIDTH < last)
#pragma unroll
      for (int i = 0; i < WIDTH; i++) before[k][i] = own, own *= to_float(q[k].e[i]);
  float after = of_others(own);
  const float slope = row < rows ? to_float(g[row]) : 0.f;
#pragma unroll
  for (int k = PACKETS - 1; k >= 0; k--)
    if (first + k * THREADS * WIDTH < last) {
      float made[WIDTH];
#pragma unroll
      for (int i = WIDTH - 1; i >= 0; i--) made[i] = slope * (before[k][i] * after), after *= to_float(q[k].e[i]);
      store<T, WIDTH>(dx + first + k * THREADS * WIDTH, made);
    }
}
