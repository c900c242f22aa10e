// Whether arrays are finite: what loading asks of every weight.
//
// Contract: x is 16-byte aligned, `count` elements. One pass, read only; no sums, so no order matters.
#pragma once

// *broken = 1 where x holds NaN or infinity; else it stays as it is.
extern "C" __global__ void __launch_bounds__(256) mark_broken(const T* x, int* broken, const long long count) {
  constexpr int N = 16 / sizeof(T);
  const long long thread = blockIdx.x * 256ll + threadIdx.x, packets = count / N;
  bool sound = true;
#pragma unroll 4
  for (long long p = thread; p < packets; p += gridDim.x * 256ll) {
    const Packet<T, N> q = reinterpret_cast<const Packet<T, N>*>(x)[p];
#pragma unroll
    for (int i = 0; i < N; i++) sound &= fabsf(to_float(q.e[i])) < INFINITE;
  }
  if (packets * N + thread < count) sound &= fabsf(to_float(x[packets * N + thread])) < INFINITE;
  if (!sound) *broken = 1;
}
