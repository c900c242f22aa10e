// Attention where all keys fit one tile, as a caption's do, by warpgroups (compute capability 9.0): what forward and
// gradients share.
//
// A block is one warpgroup. It has all keys and values of a head in shared memory. It takes tiles of TILE queries at equal
// distances, of which STAGES are there or on their way. A multiprocessor holds several blocks, so that one's products go on
// beside another's exponentials.
#pragma once
#include "ops/attention/wgmma.cuh"

constexpr int KEYS = 80, THREADS = 128, STAGES = 3, SUMS = KEYS / 2;  // of a thread, of TILE x KEYS
constexpr u32 KEY_BYTES = KEYS * HEAD * 2;

// s = a b^T for TILE rows a and the keys or values b.
__device__ __forceinline__ void scores(float (&s)[SUMS], u32 a, u32 b) {
  along_overwrite(s, operand(a), operand(b));
#pragma unroll
  for (int k = 1; k < HEAD / 16; k++) along(s, operand(a + k * 32), operand(b + k * 32));
}

// The column that a thread's i-th sum is of.
__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// TILE rows of HEAD as products leave them, a thread's two rows times their factors, to a tile in shared memory.
__device__ __forceinline__ void put(u32 to, const float (&sums)[32], float factor, float factor2) {
  u32 lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < HEAD / 8; j += 2) {
    u32 made[4];
#pragma unroll
    for (int h = 0; h < 4; h++) {
      float by = h % 2 ? factor2 : factor;
      made[h] = packed(sums[4 * j + 2 * h] * by, sums[4 * j + 2 * h + 1] * by);
    }
    put4(to + line * 128 + ((j + lane / 16 ^ line % 8) << 4), made);
  }
}

// Asks for all keys and values of a head.
__device__ __forceinline__ void fetch_keys(
    u32 keys, u32 values, const TensorMap& key, const TensorMap& value, u32 barrier, int head, int batch
) {
  expect(barrier, 2 * KEY_BYTES);
  fetch(keys, key, barrier, 0, head, batch);
  fetch(values, value, barrier, 0, head, batch);
}
