// Blocks counted as they come, by an instruction that CUDA C++ has no function for.
#pragma once

// How many came before, of those that count up to `top` and then from zero again. What came before has stored is seen,
// and what this thread, or its block before a barrier, has stored is seen by all who come later: one fence where
// __threadfence before and after an atomic are two, each of the stronger kind.
__device__ __forceinline__ unsigned came_before(unsigned* counter, unsigned top) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(top) : "memory");
  return before;
}

// Waits until all `blocks` have come here; all their threads then see what the others stored before. `barrier` is how many
// have come, zero whenever no kernel runs, and how often all had. All blocks must be resident at once.
__device__ __forceinline__ void all_here(unsigned* barrier, unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0 && blocks > 1) {
    unsigned times, now;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(times) : "l"(barrier + 1) : "memory");
    if (came_before(barrier, blocks - 1) == blocks - 1) {
      asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(barrier + 1), "r"(times + 1) : "memory");
    } else {
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(barrier + 1) : "memory");
      while (now == times);
    }
  }
  __syncthreads();
}
