// Rows rotated by groups of 256 or 64 columns as by convrot.cuh, in products of warps with the matrix of 16 rows.
//
// Contract: as there, but GROUP is 256 or 64, and 32 neighbouring threads have packets of one row: a thread begins with packet
// `taken`, and ends with packet `turned_by_products`. A number goes into a product as two of bf16, together to 2^-18 of it;
// EXACT: bf16 hold it. So it is for what is stored in 16 bits. Sums are fp32. The first product is over bits 0, 1, 4 and 5 of a
// column's number, the second over 2, 3, 6 and 7, of which a group of 64 has what a thread has. Below compute capability 8.0
// it is convrot.cuh's.
#pragma once
#include "backend/cuda/codegen/convrot.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <int GROUP, bool EXACT> __device__ __forceinline__ void rotate_by_products(float (&v)[8]) { rotate<GROUP>(v); }
__device__ __forceinline__ int taken(int p) { return p; }
template <int GROUP> __device__ __forceinline__ int turned_by_products(int p) { return turned<GROUP>(p); }
#else
// c += a b, of 16 x 16 and 16 x 8.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b, unsigned b2) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}

// Two entries, of columns k and k + 1 and row m: their signs depend on k ^ m alone. Bits 0 and 3 are a pair, and 1 and 2.
__device__ __forceinline__ unsigned entries(int differing) {
  unsigned two = 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int d = differing ^ e;
    two |= (((d & 9) == 9) != ((d & 6) == 6) ? 0xbe80u : 0x3e80u) << 16 * e;  // a quarter, in bf16
  }
  return two;
}

// The nearest bf16 of two numbers, and of what these lack.
__device__ __forceinline__ void split(float x, float y, unsigned& near, unsigned& rest) {
  from_two(x, y, reinterpret_cast<bf16*>(&near));
  from_two(x - __uint_as_float(near << 16), y - __uint_as_float(near & 0xffff0000u), reinterpret_cast<bf16*>(&rest));
}

template <int GROUP, bool EXACT> __device__ __forceinline__ void rotate_by_products(float (&v)[8]) {
  const int lane = threadIdx.x & 31, differing = (lane & 3) * 2 ^ lane >> 2;
  const unsigned same = entries(differing), other = entries(differing ^ 8), matrix[4] = {same, other, other, same};
  unsigned near[4], rest[4];
  float sums[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (EXACT) near[i] = __float_as_uint(v[2 * i]) >> 16 | (__float_as_uint(v[2 * i + 1]) & 0xffff0000u);  // as it was loaded
    else split(v[2 * i], v[2 * i + 1], near[i], rest[i]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!EXACT) multiply(sums[i], matrix, rest[2 * i], rest[2 * i + 1]);
    multiply(sums[i], matrix, near[2 * i], near[2 * i + 1]);
  }
  if (GROUP == 256) {
#pragma unroll
    for (int i = 0; i < 4; i++) split(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1], near[i], rest[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = 0.f;
      multiply(sums[i], rest, i ? other : same, i ? same : other);
      multiply(sums[i], near, i ? other : same, i ? same : other);
    }
  } else {
    rotate_four(sums[0][0], sums[1][0], sums[0][1], sums[1][1]);
    rotate_four(sums[0][2], sums[1][2], sums[0][3], sums[1][3]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = sums[i / 4][i % 4];
  swap<1, 4>(v);  // bit 3 of the column's number, which the thread had, for bit 0
}

// The packet of its row that thread p begins with, and that it ends with.
__device__ __forceinline__ int taken(int p) { return (p & ~7) | (p & 3) << 1 | (p >> 2 & 1); }
template <int GROUP> __device__ __forceinline__ int turned_by_products(int p) { return (p & ~31) | (p >> 2 & 7) | (p & 3) << 3; }
#endif
