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
