// Copies from memory to a thread's own places in shared memory that the thread does not wait for, in groups. The
// instructions are those that NVRTC has no function for (PTX ISA 7.0, cp.async; compute capability 8.0).
//
// Contract: both places are multiples of 16 bytes, as P is large. What has come is read by the thread that requested it, so
// that no barrier is needed.
#pragma once

template <typename P> __device__ __forceinline__ void copy_async(P* to, const P* from) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int i = 0; i < (int)sizeof(P); i += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + i),
                 "l"(reinterpret_cast<const char*>(from) + i) : "memory");
}

// 16 bytes, or as many zeros.
__device__ __forceinline__ void copy_or_zeros(unsigned place, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups but the last LEFT have come.
template <int LEFT> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
