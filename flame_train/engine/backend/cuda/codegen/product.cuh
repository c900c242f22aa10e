// Products over threads, as the sums of dtypes.cuh are: a header of its own, which few kernels take.
#pragma once

struct Prod {
  static __device__ __forceinline__ float none() { return 1.f; }
  static __device__ __forceinline__ float of(float a, float b) { return a * b; }
};
