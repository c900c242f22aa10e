// What becomes of a tile's whole sums of int8 products, in dual_gemm.cuh: factors of rows and columns, a rotation, and then
// a second product. Both are of warps: one of warpgroups would want registers of its own for sums that others have changed.
//
// Contract: as there. A thread has of row `lane / 4`, and of that eight below, columns 8 j + lane % 4 * 2 and the next. GROUP
// columns are rotated together (convrot.cuh), a divisor of the tile's; 0: none. Where they are, columns have no factors.
#pragma once

struct Factors { const float *rows, *columns; };

// By bits 4 and 5 of a column's number: values 8 apart.
__device__ __forceinline__ void rotate_own(float* x) {
  const float half = ((x[0] + x[8]) + (x[16] + x[24])) * 0.5f;
  const float a = half - x[24], b = half - x[16];
  x[24] = half - x[0], x[16] = half - x[8], x[8] = b, x[0] = a;
}

// A value of the block of 64 columns `block`, rotated by bits 6 and 7: twice that, of values in four blocks. Whole sums stay
// where their products left them: as floats in their place they would want registers of their own, of which there are none.
__device__ __forceinline__ int rotated_twice(const int* of, int block) {
  const int a = of[0], b = of[32], c = of[64], d = of[96];
  return block == 0 ? (a + b) + (c - d) : block == 1 ? (a - c) + (b + d) : block == 2 ? (a - b) + (c + d) : (b - a) + (c + d);
}

__device__ __forceinline__ void warp_product(float* c, const u32 (&a)[4], u32 b, u32 b2, __nv_bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}
__device__ __forceinline__ void warp_product(float* c, const u32 (&a)[4], u32 b, u32 b2, __half) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}

// Two entries, for columns k and k + 1, of the matrix of 16 rows that rotates by four bits: an entry depends on k ^ n alone.
__device__ __forceinline__ u32 entries(int differing) {
  u32 two = 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int d = differing ^ e;
    two |= ((d & 3) == 3) != (d >> 2 == 3) ? 0xbe80u << 16 * e : 0x3e80u << 16 * e;  // a quarter, in bf16
  }
  return two;
}

// 16 columns of 64 rows, as values 0 to 7 of a thread, rotated by the lowest four bits of their numbers: a product of the
// warp's. A value goes into it as two of bf16, together to 2^-18 of it.
__device__ __forceinline__ void rotate_16(float* x, u32 same, u32 other) {
  u32 near[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    near[i] = packed(x[2 * i], x[2 * i + 1], __nv_bfloat16());
    const float upper = x[2 * i + 1] - __uint_as_float(near[i] & 0xffff0000u);
    rest[i] = packed(x[2 * i] - __uint_as_float(near[i] << 16), upper, __nv_bfloat16());
  }
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = 0.f;
  warp_product(x, rest, same, other, __nv_bfloat16());
  warp_product(x + 4, rest, other, same, __nv_bfloat16());
  warp_product(x, near, same, other, __nv_bfloat16());
  warp_product(x + 4, near, other, same, __nv_bfloat16());
}

// 64 columns of 64 rows, by their factors and rotated: block `block` of the whole sums of a tile's width. Value 4 j + 2 h + e is
// of column e of group j, in row h.
__device__ __forceinline__ void scaled(
    float (&sums)[32], const int* whole, int block, const Factors& by, int row, int column, int m, int n
) {
  const int own = row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const float once = GROUP > 64 ? 0.5f : 1.f;
  const float upper = own < m ? once * by.rows[own] : 0.f, lower = own + 8 < m ? once * by.rows[own + 8] : 0.f;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const int first = column + 2 * i + threadIdx.x % 4 * 2;
    float2 across = make_float2(1.f, 1.f);
    if (!GROUP && by.columns && first < n) across = *reinterpret_cast<const float2*>(by.columns + first);
#pragma unroll
    for (int e = i; e < i + 4; e++) {
      const float x = static_cast<float>(GROUP > 64 ? rotated_twice(whole + e, block) : whole[32 * block + e]);
      sums[e] = x * (e & 2 ? lower : upper) * (e & 1 ? across.y : across.x);
    }
  }
  if (!GROUP) return;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (GROUP > 16) rotate_own(sums + i);
  const int lane = threadIdx.x % 32, differing = lane % 4 * 2 ^ lane / 4;
  const u32 same = entries(differing), other = entries(differing ^ 8);
#pragma unroll
  for (int i = 0; i < 32; i += 8) rotate_16(sums + i, same, other);
}

// Four 8 x 8 matrices from shared memory, each lane naming a row of one; TURNED: transposed.
template <bool TURNED> __device__ __forceinline__ void take4(u32 (&x)[4], u32 row) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}

// sums += a2 b2, in 64 columns from `column` on: 64 rows of a2, and b2 or its transpose as ACROSS says, in rows of 128 bytes
// that are swizzled by as many.
__device__ __forceinline__ void low_added(float (&sums)[32], u32 a2, u32 b2, int column) {
  const int lane = threadIdx.x % 32, line = lane % 8, half = lane / 8 % 2, side = lane / 16;
  const u32 left = a2 + (threadIdx.x % 128 / 32 * 16 + half * 8 + line) * 128, right = b2 + column * 128;
#pragma unroll
  for (int k = 0; k < RANK / 16; k++) {
    u32 a[4];
    take4<false>(a, left + ((k * 2 + side ^ line) << 4));
#pragma unroll
    for (int j = 0; j < 4; j++) {  // 16 columns
      u32 b[4];
      if (ACROSS) take4<true>(b, right + (k * 16 + half * 8 + line) * 128 + ((j * 2 + side ^ line) << 4));
      else take4<false>(b, right + (j * 16 + side * 8 + line) * 128 + ((k * 2 + half ^ line) << 4));
      warp_product(sums + 8 * j, a, b[0], b[1], T());
      warp_product(sums + 8 * j + 4, a, b[2], b[3], T());
    }
  }
}
