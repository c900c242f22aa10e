// Products of a warp, m16 n8 k16 in bf16 or fp16, and the matrices that they read (compute capability 8.0). After PTX ISA
// 7.0, sections on ldmatrix and mma.
#pragma once
#include "backend/cuda/fragments.cuh"

// Four 8 x 8 matrices, each lane naming a row of one: of a row a thread gets two columns.
__device__ __forceinline__ void matrices(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}
// The same, where of a column a thread gets two rows.
__device__ __forceinline__ void matrices_across(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}

// c += a b, of 16 x 16 and 16 x 8. A thread has columns 2 t and 2 t + 1 of rows g and g + 8 of c, lane = 4 g + t.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b, u32 b2, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b, u32 b2, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}
