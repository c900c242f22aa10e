// Means of columns and what their squares from them add up to, so that nothing cancels.
//
// Contract: as column_reduce.cuh. Parts are merged by what they are, not in turn. First comes the mean of all, then
// each part's squares, with as many times the square of how far its own mean lies off.
#pragma once
#include "backend/cuda/codegen/column_reduce.cuh"

struct Moment { float mean, squares; };

// A thread's rows one by one, each of WIDTH columns (Welford).
template <int WIDTH> struct Running {
  float count = 0.f, mean[WIDTH] = {}, squares[WIDTH] = {};
  template <typename S> __device__ __forceinline__ void add(const Packet<S, WIDTH>& q) {
    count += 1.f;
    const float share = __fdividef(1.f, count);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const float v = to_float(q.e[i]), d = v - mean[i];
      mean[i] += d * share;
      squares[i] += d * (v - mean[i]);
    }
  }
};

// What threads of a block know of their columns, `n` elements in each, as one; for the first ACROSS * WIDTH threads.
// `each` hands a function every part that the thread has: how many elements of a column, their means, their squares.
template <int ACROSS, int WIDTH, int THREADS, class Each> __device__ __forceinline__ Moment merged(float n, Each each) {
  __shared__ float known[ACROSS * WIDTH];
  float sums[WIDTH] = {}, squares[WIDTH] = {};
  each([&](float count, const float* mean, const float* own) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      sums[i] += count * mean[i];
      squares[i] += own[i];
    }
  });
  const float middle = of_columns<Sum, ACROSS, WIDTH, THREADS>(sums) / n;
  if (threadIdx.x < ACROSS * WIDTH) known[threadIdx.x] = middle;
  __syncthreads();
  each([&](float count, const float* mean, const float*) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      const float d = mean[i] - known[i * ACROSS + threadIdx.x % ACROSS];
      squares[i] += count * d * d;
    }
  });
  return {middle, of_columns<Sum, ACROSS, WIDTH, THREADS>(squares)};
}
