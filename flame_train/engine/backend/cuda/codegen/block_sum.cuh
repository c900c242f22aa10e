// The sum over a block's threads, in every one of them, always in the same order. THREADS is a power of two.
#pragma once

template <int THREADS> __device__ __forceinline__ double block_sum(double v) {
  __shared__ double shared[THREADS];
  shared[threadIdx.x] = v;
  for (int half = THREADS / 2; half; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  __syncthreads();
  const double sum = shared[0];
  __syncthreads();
  return sum;
}
