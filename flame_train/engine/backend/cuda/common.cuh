// Shared by all kernels: element type T (the compile option ELEMENT), eight-element packets, block sums.
// Arithmetic is fp32; T is only how values are stored.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef ELEMENT T;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename S> __device__ __forceinline__ S from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Eight elements, moved with 16-byte accesses. Addresses must be 16-byte aligned.
struct alignas(16) Packet { T e[8]; };

__device__ __forceinline__ Packet read8(const T* p) { return *reinterpret_cast<const Packet*>(p); }
__device__ __forceinline__ void unpack8(const Packet& q, float* f) {
#pragma unroll
  for (int i = 0; i < 8; i++) f[i] = to_float(q.e[i]);
}
__device__ __forceinline__ void load8(const T* p, float* f) { unpack8(read8(p), f); }
__device__ __forceinline__ void store8(T* p, const float* f) {
  Packet q;
#pragma unroll
  for (int i = 0; i < 8; i++) q.e[i] = from_float<T>(f[i]);
  *reinterpret_cast<Packet*>(p) = q;
}

// In 16 bits by the processor's own exponential and division, which err in the last digits of an fp32.
__device__ __forceinline__ float sigmoid(float x) {
  return sizeof(T) == 2 ? __fdividef(1.f, 1.f + __expf(-x)) : 1.f / (1.f + expf(-x));
}

__device__ __forceinline__ float2 warp_sum(float2 v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    v.x += __shfl_xor_sync(0xffffffffu, v.x, o);
    v.y += __shfl_xor_sync(0xffffffffu, v.y, o);
  }
  return v;
}
