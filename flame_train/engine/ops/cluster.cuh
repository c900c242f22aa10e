// What blocks of a cluster read of each other's shared memory (compute capability 9.0; PTX ISA 7.8, mapa and barrier.cluster).
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

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

// Hands the last of a cluster's SIZE blocks, which lie along the grid's y, what each of them has: `own`, VALUES numbers of
// each of the first COLUMNS threads, to the same threads as `all`. False for the others, which are done.
template <int SIZE, int VALUES, int COLUMNS>
__device__ __forceinline__ bool gathered(const float (&own)[VALUES], float (&all)[SIZE][VALUES]) {
  __shared__ float shared[VALUES][COLUMNS];
  const bool last = blockIdx.y % SIZE == SIZE - 1;
  if (threadIdx.x < COLUMNS)
#pragma unroll
    for (int v = 0; v < VALUES; v++) shared[v][threadIdx.x] = own[v];
  everyone();
  if (last && threadIdx.x < COLUMNS)
#pragma unroll
    for (int block = 0; block < SIZE; block++)
#pragma unroll
      for (int v = 0; v < VALUES; v++) all[block][v] = theirs(&shared[v][threadIdx.x], block);
  everyone();  // a block's shared memory is there until it has been read
  return last;
}
