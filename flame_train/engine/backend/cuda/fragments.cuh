// What products of tensor cores read and leave in registers: pairs of elements, sums whose rows four threads share.
#pragma once
#include "backend/cuda/common.cuh"

typedef unsigned u32;

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ u32 shared_at(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ u32 packed(float x, float y, __half) {
  __half2 pair = __floats2half2_rn(x, y);
  return *reinterpret_cast<u32*>(&pair);
}
__device__ __forceinline__ u32 packed(float x, float y, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<u32*>(&pair);
}
// Two sums as a product's left operand has them.
__device__ __forceinline__ u32 packed(float x, float y) { return packed(x, y, T()); }

// Two floats of shared memory
__device__ __forceinline__ float2 pair_from(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of the four threads that share a row.
__device__ __forceinline__ float of_row(float x, bool sum) {
#pragma unroll
  for (int o = 1; o < 4; o *= 2) {
    float other = __shfl_xor_sync(0xffffffffu, x, o);
    x = sum ? x + other : fmaxf(x, other);
  }
  return x;
}
