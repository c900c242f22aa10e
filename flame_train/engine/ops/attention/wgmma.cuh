// Attention for heads of 64 by warpgroups (compute capability 9.0): what the forward and the backward kernel share.
//
// The first warpgroup of a block loads tiles. Each of the others owns TILE rows of one side, such as queries. It goes
// through the tiles of the other side, such as keys, as they come. Blocks are persistent: each works on one item (rows of
// a head) after another. The next item's tiles are loaded while the last one is being finished.
#pragma once
#include "backend/cuda/hopper.cuh"

constexpr int TILE = 64, HEAD = 64;
constexpr u32 TILE_BYTES = TILE * HEAD * 2;

struct Rows {
  T* at;
  long long batch, head, row;
  __device__ T* head_of(int b, int h) const { return at + b * batch + h * head; }
};
struct Sizes { int batches, heads, queries, keys; float scale; };

// The n-th item of this block. Every other round goes through the blocks backwards. Items come longest first, so a block
// that had a long one in one round has a shorter one in the next.
__device__ __forceinline__ int nth(int n) {
  return n * gridDim.x + (n % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// Shared memory: `owns` places for owned rows, `stages` places for passing tiles, and the rest behind them. Each place
// has two barriers: one completes when its bytes have arrived (`came`, `full`), one when all warps have read them
// (`left`, `empty`).
struct Memory {
  u32 own, places, rest, came, left, full, empty;
  __device__ Memory(void* memory, u64* barriers, int owns, u32 own_bytes, int stages, u32 stage_bytes)
      : own((shared_at(memory) + 1023) & ~1023u), places(own + owns * own_bytes), rest(places + stages * stage_bytes),
        came(shared_at(barriers)), left(came + 8 * owns), full(left + 8 * owns), empty(full + 8 * stages) {}
  __device__ void begin(int owns, int stages, int warps) const {
    for (int i = 0; i < owns; i++) begin_barrier(came + 8 * i, 1), begin_barrier(left + 8 * i, warps);
    for (int i = 0; i < stages; i++) begin_barrier(full + 8 * i, 1), begin_barrier(empty + 8 * i, warps);
    show_barriers();
  }
};

// Warpgroups ask for their products by turns, so that one has the tensor cores while another finds exponentials
// (FlashAttention-3, 3.1). The last says once that the first may begin.
__device__ __forceinline__ void await_turn(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void next_turn(u32 group, u32 groups) {
  asm volatile("bar.arrive %0, 256;" ::"r"((group + 1) % groups + 1) : "memory");
}

// sums += a b, for four registers of a every 16 rows of b.
template <int HELD> __device__ __forceinline__ void add(float (&sums)[32], const u32 (&a)[HELD], u32 b) {
#pragma unroll
  for (int k = 0; k < HELD / 4; k++) across(sums, a + 4 * k, operand(b + k * 16 * 128));
}

// A warpgroup's TILE rows of a head from `row` on, of which there are `rows`, each thread's two times their factors.
__device__ __forceinline__ void leave(
    const float (&sums)[32], float factor, float factor2, T* to, long long distance, int row, int rows
) {
  row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  to += threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (int own = row + i % 2 * 8; own < rows) {
      float by = i % 2 ? factor2 : factor;
      *reinterpret_cast<u32*>(to + own * distance + i / 2 * 8) = packed(sums[2 * i] * by, sums[2 * i + 1] * by);
    }
}
