// Rows rotated by groups of columns, each multiplied by a Kronecker power of the regular Hadamard matrix of 4 rows
// (ConvRot, arXiv 2512.03673).
//
// Contract: GROUP is 16, 64 or 256. A thread has eight neighbouring values of a row, its neighbours the next ones, GROUP
// / 8 threads a group, all of which take part. The matrix of 4 rows times (a, b, c, d) is half their sum less (d, c, b,
// a). So a power of it is one such step for each two bits of a column's number. Of these bits a thread's own values have
// three, and the lane the others, which `swap` exchanges. Sums are fp32.
#pragma once

__device__ __forceinline__ void rotate_four(float& a, float& b, float& c, float& d) {
  const float half = ((a + b) + (c + d)) * 0.5f, e = half - d, f = half - c;
  d = half - a, c = half - b, a = e, b = f;
}

// Values I and I + BIT of eight, for all I without BIT: the lane's own bit LANE is exchanged with BIT of their number.
template <int BIT, int LANE> __device__ __forceinline__ void swap(float (&v)[8]) {
  const bool upper = threadIdx.x & LANE;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i & BIT) continue;
    const float came = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i | BIT], LANE);
    if (upper) v[i] = came;
    else v[i | BIT] = came;
  }
}

// The bits that a thread has are, in `v` from the lowest on, those that the comments name. Where it ends, the thread has
// the eight values of packet `turned` of the group.
template <int GROUP> __device__ __forceinline__ void rotate(float (&v)[8]) {
  rotate_four(v[0], v[1], v[2], v[3]);
  rotate_four(v[4], v[5], v[6], v[7]);  // 0 1 2
  swap<1, 1>(v);                        // 3 1 2, the lane's first bit is 0
  rotate_four(v[0], v[4], v[1], v[5]);
  rotate_four(v[2], v[6], v[3], v[7]);
  if (GROUP > 16) {
    swap<1, 2>(v);  // 4 1 2, the second is 3
    swap<4, 4>(v);  // 4 1 5, the third is 2
    rotate_four(v[0], v[1], v[4], v[5]);
    rotate_four(v[2], v[3], v[6], v[7]);
  }
  if (GROUP > 64) {
    swap<1, 8>(v);   // 6 1 5, the fourth is 4
    swap<4, 16>(v);  // 6 1 7, the fifth is 5
    rotate_four(v[0], v[1], v[4], v[5]);
    rotate_four(v[2], v[3], v[6], v[7]);
  }
  swap<1, 1>(v);                  // 0 1 ., the first is what was first of the thread: 3, 4 or 6
  if (GROUP > 16) swap<4, 4>(v);  // 0 1 2, the third is 5 or 7
}

// The packet of its group, or of its row, whose values a thread has after `rotate` where it had packet p before.
template <int GROUP> __device__ __forceinline__ int turned(int p) {
  if (GROUP == 16) return p;
  if (GROUP == 64) return (p & ~7) | (p & 1) << 1 | (p & 2) >> 1 | (p & 4);
  return (p & ~31) | (p & 1) << 3 | (p & 2) >> 1 | (p & 4) << 2 | (p & 8) >> 2 | (p & 16) >> 2;
}
