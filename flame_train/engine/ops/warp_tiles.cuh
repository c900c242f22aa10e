// Small matrix products by warps, for 16-bit elements: memory to shared memory, shared memory to registers, and what
// blocks of a cluster (compute capability 9.0) read of each other.
#pragma once
#include "common.cuh"

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void fetch16(T* to, const T* from, bool valid) {
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
// Four 8 x 8 matrices, each lane naming a row of one; turned over on the way, or as they lie.
__device__ __forceinline__ void turned4(unsigned* r, const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void straight4(unsigned* r, const T* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
// c (16 x 8, fp32) += a (16 x 16) b (16 x 8), spread over a warp as the processor wants it.
template <typename S> __device__ __forceinline__ void multiply(float* c, const unsigned* a, const unsigned* b);
#define MULTIPLY(TYPE, NAME)                                                                                        \
  template <> __device__ __forceinline__ void multiply<TYPE>(float* c, const unsigned* a, const unsigned* b) {      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                      \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                               \
  }
MULTIPLY(__nv_bfloat16, "bf16")
MULTIPLY(__half, "f16")

__device__ __forceinline__ void everyone() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// One float or four of another block's shared memory, at the address they have in this one's.
__device__ __forceinline__ float theirs(const float* own, int block) {
  unsigned at;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(own)), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}
__device__ __forceinline__ float4 theirs(const float4* own, int block) {
  unsigned at;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(own)), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
