// out (M, N) = a (M, K) b + a2 (M, parts RANK) b2 (+ bias (N)) (+ plus (M, N)): two products and their sum in one pass.
//
// b is the transpose of an array (N, K) or, ACROSS, an array (K, N) itself; b2 likewise, with RANK for K. The columns of the
// result are equal parts, of which the i-th multiplies columns i RANK.. of a2: with one part a layer, with several the layers
// of one input; a tile's columns lie in one part. T is bf16 or fp16, sums are fp32 and rounded once. Rows start at multiples
// of 16 bytes; RANK is 16, 32, 48 or 64. Sizes need not be multiples of a tile's.
//
// A block has a tile of ROWS x COLUMNS at a time. Its first warpgroup fetches DEPTH columns of a and b at a time into STAGES
// places, the CONSUMERS others multiply HIGH times 64 rows each. The two blocks of a cluster have tiles one below the other,
// and each fetches half of b's for both. Grid: pairs of blocks, at most one block a multiprocessor; THREADS a block. Order
// of sums: along K, then along RANK, the same in every run.
#include "hopper.cuh"

constexpr int DEPTH = 64, ROWS = 64 * HIGH * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr int TOGETHER = 8;  // tiles of rows that are gone through column by column, so that what a wave reads stays in L2
constexpr u32 A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 BLOCK_BYTES = 64 * 64 * 2;

struct Sizes { int m, n, k, part; };
struct Added { const T *plus, *bias; long long plus_row; };
struct Tile { int row, column; };

// Which place comes next, and which of its uses this is.
struct Place {
  u32 stage = 0, phase = 0;
  __device__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

struct Tiles {
  int high, wide;
  __device__ Tiles(const Sizes& s) : high((s.m + 2 * ROWS - 1) / (2 * ROWS)), wide((s.n + COLUMNS - 1) / COLUMNS) {}
  __device__ int count() const { return high * wide; }
  __device__ Tile at(int i, u32 block) const {
    int first = i / (TOGETHER * wide) * TOGETHER, inside = i - first * wide, rows = min(TOGETHER, high - first);
    return {((first + inside % rows) * 2 + static_cast<int>(block)) * ROWS, inside / rows * COLUMNS};
  }
};

__device__ __forceinline__ void fetch_half(u32 to, const TensorMap& b, u32 barrier, int depth, int column, u32 block) {
#if ACROSS
#pragma unroll
  for (int j = 0; j < COLUMNS / 64; j++)
    fetch_for_both(to + j * BLOCK_BYTES + block * (BLOCK_BYTES / 2), b, barrier, column + j * 64, depth + block * 32);
#else
  fetch_for_both(to + block * (B_BYTES / 2), b, barrier, depth, column + block * (COLUMNS / 2));
#endif
}

// sums += a tile of a times a tile of b, STEPS times 16 deep; sums = where nothing has begun.
template <int STEPS>
__device__ __forceinline__ void multiply(float (&sums)[HIGH][COLUMNS / 2], u32 a, u32 b, int begun) {
  begin_products();
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    u64 right = ACROSS ? operand(b + k * 16 * 128, BLOCK_BYTES) : operand(b + k * 32);
#pragma unroll
    for (int i = 0; i < HIGH; i++) product(sums[i], operand(a + i * BLOCK_BYTES + k * 32), right, k > 0 ? 1 : begun);
  }
  end_products();
}

struct alignas(4) Pair { T x, y; };

__device__ __forceinline__ float2 pair_at(const T* p, bool there) {
  if (!there) return make_float2(0.f, 0.f);
  Pair pair = *reinterpret_cast<const Pair*>(p);
  return make_float2(to_float(pair.x), to_float(pair.y));
}
__device__ __forceinline__ u32 pair_of(float x, float y) {
  Pair pair = {from_float<T>(x), from_float<T>(y)};
  return *reinterpret_cast<u32*>(&pair);
}

// A warpgroup's rows of a tile, through BUFFERS places for 64 x 64 in shared memory. The last of them are sent while the next
// tile is multiplied.
template <bool BIAS, bool PLUS>
__device__ __forceinline__ void finish(
    float (&sums)[HIGH][COLUMNS / 2], const TensorMap& out, const Added& added, const Sizes& s, Tile tile, u32 buffers, int group
) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, line = warp * 16 + lane % 16;
  bool sender = threadIdx.x % 128 == 0;
#pragma unroll
  for (int block = 0; block < HIGH * (COLUMNS / 64); block++) {
    int row0 = tile.row + block / (COLUMNS / 64) * 64, column0 = tile.column + block % (COLUMNS / 64) * 64;
    float* sum = sums[block / (COLUMNS / 64)] + block % (COLUMNS / 64) * 32;
    u32 buffer = buffers + block % BUFFERS * BLOCK_BYTES;
    if (sender) sent<BUFFERS - 1>();
    warpgroup_sync(group + 1);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 made[4];
#pragma unroll
      for (int h = 0; h < 4; h++) {
        int row = row0 + warp * 16 + h % 2 * 8 + lane / 4, column = column0 + (j + h / 2) * 8 + lane % 4 * 2;
        float x = sum[(j + h / 2) * 4 + h % 2 * 2], y = sum[(j + h / 2) * 4 + h % 2 * 2 + 1];
        if (BIAS) {
          float2 more = pair_at(added.bias + column, column < s.n);
          x += more.x, y += more.y;
        }
        if (PLUS) {
          float2 more = pair_at(added.plus + row * added.plus_row + column, row < s.m && column < s.n);
          x += more.x, y += more.y;
        }
        made[h] = pair_of(x, y);
      }
      put4(buffer + line * 128 + ((j + lane / 16 ^ line % 8) << 4), made);
    }
    show_to_sender();
    warpgroup_sync(group + 1);
    if (sender) send(out, buffer, column0, row0);
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) paired_product(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap a2,
    const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, const Added added, const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  u32 base = (shared_at(memory) + 1023) & ~1023u, full = shared_at(barriers), empty = full + 8 * STAGES;
  u32 block = blockIdx.x % 2;
  int steps = (s.k + DEPTH - 1) / DEPTH;
  Tiles tiles(s);
  Place at;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) begin_barrier(full + 8 * i, 1), begin_barrier(empty + 8 * i, 2 * CONSUMERS);
    show_barriers();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 2 ? 40 : 32));
    if (threadIdx.x == 0)
      for (int i = blockIdx.x / 2; i < tiles.count(); i += gridDim.x / 2) {
        Tile tile = tiles.at(i, block);
        for (int step = 0; step <= steps; step++, at.next()) {
          u32 to = base + at.stage * STAGE_BYTES, barrier = full + 8 * at.stage;
          bool second = step == steps;
          wait(empty + 8 * at.stage, at.phase ^ 1);
          expect(barrier, STAGE_BYTES);
          fetch(to, second ? a2 : a, barrier, second ? tile.column / s.part * RANK : step * DEPTH, tile.row);
          fetch_half(to + A_BYTES, second ? b2 : b, barrier, second ? 0 : step * DEPTH, tile.column, block);
        }
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 2 ? 232 : 160));
    int group = threadIdx.x / 128 - 1;
    u32 told = threadIdx.x % 128;  // the first two threads tell one block of the cluster each
    float sums[HIGH][COLUMNS / 2];
    for (int i = blockIdx.x / 2; i < tiles.count(); i += gridDim.x / 2) {
      Tile tile = tiles.at(i, block);
      tile.row += group * 64 * HIGH;
      u32 before = 0, own = base + group * HIGH * BLOCK_BYTES;
      for (int step = 0; step < steps; step++, at.next()) {
        wait(full + 8 * at.stage, at.phase);
        multiply<DEPTH / 16>(sums, own + at.stage * STAGE_BYTES, base + at.stage * STAGE_BYTES + A_BYTES, step > 0);
        products_done<1>();
        if (told < 2 && step > 0) arrive_at(empty + 8 * before, told);
        before = at.stage;
      }
      wait(full + 8 * at.stage, at.phase);
      multiply<RANK / 16>(sums, own + at.stage * STAGE_BYTES, base + at.stage * STAGE_BYTES + A_BYTES, 1);
      products_done<0>();
      if (told < 2) arrive_at(empty + 8 * before, told), arrive_at(empty + 8 * at.stage, told);
      at.next();
      u32 buffers = base + STAGES * STAGE_BYTES + group * BUFFERS * BLOCK_BYTES;
      if (added.bias)
        if (added.plus) finish<true, true>(sums, out, added, s, tile, buffers, group);
        else finish<true, false>(sums, out, added, s, tile, buffers, group);
      else if (added.plus) finish<false, true>(sums, out, added, s, tile, buffers, group);
      else finish<false, false>(sums, out, added, s, tile, buffers, group);
    }
    sent<0>();
  }
  cluster_sync();
}
