// Blocks counted as they come, by an instruction that CUDA C++ has no function for.
#pragma once

// How many came before, of those that count up to `top` and then from zero again. What came before has stored is seen.
// What this thread, or its block before a barrier, has stored is seen by all who come later. This is one fence where
// __threadfence before and after an atomic are two, each of the stronger kind.
__device__ __forceinline__ unsigned came_before(unsigned* counter, unsigned top) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(top) : "memory");
  return before;
}

// Waits until all blocks of a row of the grid have come here; all their threads then see what the others stored before.
// The last to come turns the barrier's first bit and leaves the others as they were, so it serves any number of blocks
// after another. All must be resident at once.
__device__ __forceinline__ void all_here(unsigned* barrier) {
  constexpr unsigned TURNED = 0x80000000u;
  __syncthreads();
  if (threadIdx.x == 0 && gridDim.x > 1) {
    unsigned before, now;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(barrier), "r"(blockIdx.x ? 1u : TURNED - (gridDim.x - 1)) : "memory");
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(barrier) : "memory");
    while (!((before ^ now) & TURNED));
  }
  __syncthreads();
}
