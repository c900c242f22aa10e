// Element types and their conversion, without any other header: a generated kernel then compiles in milliseconds.
//
// bf16 and fp16 are bits in a struct. Conversion to them rounds to nearest, ties to even, and keeps NaN; two at a time
// where the card can (compute capability 8.0). Whole numbers are exact up to 2^24.
#pragma once

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bool x) { return x ? 1.f : 0.f; }
__device__ __forceinline__ float to_float(int x) { return (float)x; }
__device__ __forceinline__ float to_float(long long x) { return (float)x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float to_float(fp16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
}

__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, bool& y) { y = x != 0.f; }
__device__ __forceinline__ void from_float(float x, long long& y) { y = (long long)x; }
__device__ __forceinline__ void from_float(float x, bf16& y) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  unsigned u = __float_as_uint(x);
  y.bits = x != x ? 0x7fff : (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
}
__device__ __forceinline__ void from_float(float x, fp16& y) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}

// Two neighbours at once; they lie in one aligned 32-bit word.
template <typename S> __device__ __forceinline__ void from_two(float a, float b, S* y) {
  from_float(a, y[0]);
  from_float(b, y[1]);
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void from_two(float a, float b, bf16* y) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<unsigned*>(y)) : "f"(b), "f"(a));
}
__device__ __forceinline__ void from_two(float a, float b, fp16* y) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<unsigned*>(y)) : "f"(b), "f"(a));
}
#endif

// The same to e4m3, of numbers up to 448, and one of these back, where the card can.
#if __CUDA_ARCH__ >= 890
#define OF_E4M3(bits, f) \
  asm("{.reg .b32 two; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 two, %1; mov.b32 {low, high}, two;" \
      "cvt.f32.f16 %0, low;}" : "=f"(f) : "h"(static_cast<unsigned short>(bits)))
#define E4M3_OF_TWO(a, b, y) \
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(*reinterpret_cast<unsigned short*>(y)) : "f"(b), "f"(a))
#endif
