// out (M, N) = a (M, K) b + a2 (M, parts RANK) b2 (+ bias (N)) (+ plus (M, N)): two products and their sum in one pass.
//
// Where MADE, a2 is made in the same pass: scale a thin. Here thin is the transpose of an array (parts RANK, K) or,
// ACROSS, an array (K, parts RANK) itself. Every tile makes the rows and columns of it that it needs. This costs an
// eighth of its time and spares a launch and a pass over a. The first tile of each part's columns stores them. With
// SPLITS, ACROSS, the columns of a are so many equal parts of whole DEPTHs. Then thin is (K, RANK / SPLITS), and each
// part makes columns of a2 of its own.
//
// b is the transpose of an array (N, K) or, ACROSS, an array (K, N) itself; b2 likewise, with RANK for K. The columns of the
// result are equal parts, of which the i-th multiplies columns i RANK.. of a2: with one part a layer, with several the layers
// of one input; a tile's columns lie in one part. T is bf16 or fp16, sums are fp32 and rounded once. Rows start at multiples
// of 16 bytes; RANK is 16, 32, 48 or 64. Sizes need not be multiples of a tile's.
//
// Where WHOLE, a and b are int8, b the transpose of an array, and their sums int32. Before the second product each is
// multiplied by its row's and its column's factor, and columns are rotated by GROUPs (whole_sums.cuh), without a bias. ACROSS is
// then said of b2 alone, and RANK may be 0: without a second product. MADE is 0.
//
// A block has a tile of ROWS x COLUMNS at a time. Its first warpgroup fetches DEPTH columns of a and b at a time into STAGES
// places, the CONSUMERS others multiply HIGH times 64 rows each. The two blocks of a cluster have tiles one below the other,
// and each fetches half of b's for both. Grid: pairs of blocks, at most one block a multiprocessor; THREADS a block. Order
// of sums: along K, then along RANK, the same in every run.
#include "backend/cuda/hopper.cuh"
#include "backend/cuda/whole_sums.cuh"

constexpr int DEPTH = WHOLE ? 128 : 64, ROWS = 64 * HIGH * CONSUMERS, THREADS = 128 * (CONSUMERS + 1), THIN = RANK / SPLITS;
constexpr bool LATE = GROUP > 64;  // there are no registers to request `plus` before its block
constexpr int TOGETHER = 8;  // tiles of rows that are gone through column by column, so that what a wave reads stays in L2
constexpr u32 A_BYTES = ROWS * 128, B_BYTES = COLUMNS * 128, THIN_BYTES = MADE * THIN * 128;
constexpr u32 STAGE_BYTES = A_BYTES + B_BYTES + THIN_BYTES, BLOCK_BYTES = 64 * 64 * 2;

struct Sizes { int m, n, k, part; };
struct Added {
  const T *plus, *bias;
  long long plus_row;
  T* hidden;
  long long hidden_row;
  const float *by_row, *by_column;
  float scale;
};
struct Tile { int row, column; };

struct Tiles {
  int high, wide;
  __device__ Tiles(const Sizes& s) : high((s.m + 2 * ROWS - 1) / (2 * ROWS)), wide((s.n + COLUMNS - 1) / COLUMNS) {}
  __device__ int count() const { return high * wide; }
  __device__ Tile at(int i, u32 block) const {
    int first = i / (TOGETHER * wide) * TOGETHER, inside = i - first * wide, rows = min(TOGETHER, high - first);
    return {((first + inside % rows) * 2 + static_cast<int>(block)) * ROWS, inside / rows * COLUMNS};
  }
};

struct alignas(4) Pair { T x, y; };

__device__ __forceinline__ float2 pair_in(u32 bits) {
  Pair pair = *reinterpret_cast<Pair*>(&bits);
  return make_float2(to_float(pair.x), to_float(pair.y));
}
__device__ __forceinline__ float2 pair_at(const T* p, bool there) {
  return there ? pair_in(*reinterpret_cast<const u32*>(p)) : make_float2(0.f, 0.f);
}
__device__ __forceinline__ float2 both(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

template <bool BY_ROWS>
__device__ __forceinline__ void fetch_half(u32 to, const TensorMap& b, u32 barrier, int depth, int column, u32 block) {
  if (BY_ROWS) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 64; j++)
      fetch_for_both(to + j * BLOCK_BYTES + block * (BLOCK_BYTES / 2), b, barrier, column + j * 64, depth + block * 32);
  } else {
    fetch_for_both(to + block * (B_BYTES / 2), b, barrier, depth, column + block * (COLUMNS / 2));
  }
}

#if MADE
constexpr u32 STRIP_BYTES = 16 * DEPTH * 2;  // 16 columns of thin, ACROSS

__device__ __forceinline__ void fetch_thin(u32 to, const TensorMap& thin, u32 barrier, int depth, int first) {
#if ACROSS
#pragma unroll
  for (int j = 0; j < THIN / 16; j++) fetch(to + j * STRIP_BYTES, thin, barrier, first + j * 16, depth);
#else
  fetch(to, thin, barrier, depth, first);
#endif
}

typedef float Hidden[HIGH][SPLITS][THIN / 2];

// As `multiply`, and hidden's part likewise with a tile of thin.
__device__ __forceinline__ void multiply_both(
    float (&sums)[HIGH][COLUMNS / 2], Hidden& hidden, int split, u32 a, u32 b, u32 thin, int begun, int hidden_begun
) {
  begin_products();
#pragma unroll
  for (int k = 0; k < DEPTH / 16; k++) {
    u64 right = ACROSS ? operand(b + k * 16 * 128, BLOCK_BYTES) : operand(b + k * 32);
    u64 narrow = ACROSS ? strip_operand(thin + k * 16 * 32, STRIP_BYTES) : operand(thin + k * 32);
#pragma unroll
    for (int i = 0; i < HIGH; i++) {
      u64 left = operand(a + i * BLOCK_BYTES + k * 32);
      product(sums[i], left, right, k > 0 ? 1 : begun);
      thin_product(hidden[i][split], left, narrow, k > 0 ? 1 : hidden_begun);
    }
  }
  end_products();
}

// sums += scale hidden b2. Products leave hidden where they read a left operand from, but for its precision. It is
// stored where `first`, the column of it that RANK of them begin at, is not negative.
__device__ __forceinline__ void multiply_hidden(
    float (&sums)[HIGH][COLUMNS / 2], const Hidden& hidden, u32 b, const Added& added, int m, int row, int first
) {
  u32 left[HIGH][RANK / 4];
#pragma unroll
  for (int i = 0; i < HIGH; i++)
#pragma unroll
    for (int j = 0; j < RANK / 4; j++) {
      const float* made = hidden[i][j / (THIN / 4)] + j % (THIN / 4) * 2;
      left[i][j] = packed(made[0] * added.scale, made[1] * added.scale);
      int own = row + i * 64 + threadIdx.x % 128 / 32 * 16 + j % 2 * 8 + threadIdx.x % 32 / 4;
      if (first >= 0 && own < m)
        *reinterpret_cast<u32*>(added.hidden + own * added.hidden_row + first + j / 2 * 8 + threadIdx.x % 4 * 2) = left[i][j];
    }
  begin_products();
#pragma unroll
  for (int k = 0; k < RANK / 16; k++) {
    u64 right = ACROSS ? operand(b + k * 16 * 128, BLOCK_BYTES) : operand(b + k * 32);
#pragma unroll
    for (int i = 0; i < HIGH; i++) hidden_product(sums[i], left[i] + 4 * k, right);
  }
  end_products();
}
#elif !WHOLE
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
#endif

#if WHOLE
typedef int Sums[HIGH][COLUMNS / 2];

// The sums of a tile of a and b, of int8, 32 deep a step.
__device__ __forceinline__ void multiply_whole(Sums& sums, u32 a, u32 b, int begun) {
  begin_products();
#pragma unroll
  for (int k = 0; k < DEPTH / 32; k++)
#pragma unroll
    for (int i = 0; i < HIGH; i++)
      whole_product(sums[i], operand(a + i * BLOCK_BYTES + k * 32), operand(b + k * 32), k > 0 ? 1 : begun);
  end_products();
}
#else
typedef float Sums[HIGH][COLUMNS / 2];
#endif

// What a thread has of 64 x 64 elements of `plus`, as its products lie: zeros where there are none.
struct Block { u32 pairs[16]; };

__device__ __forceinline__ Block plus_at(const Added& added, const Sizes& s, int row0, int column0) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  Block found;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int row = row0 + warp * 16 + i % 2 * 8 + lane / 4, column = column0 + i / 2 * 8 + lane % 4 * 2;
    found.pairs[i] = 0;
    if (row < s.m && column < s.n)
      found.pairs[i] = *reinterpret_cast<const u32*>(added.plus + row * added.plus_row + column);
  }
  return found;
}

// A warpgroup's rows of a tile, through BUFFERS places for 64 x 64 in shared memory. The last of them are sent while the next
// tile is multiplied. Of `plus`, whose first block is `next`, each block is requested while the one before is finished.
template <bool BIAS, bool PLUS>
__device__ __forceinline__ void finish(
    Sums& sums, const TensorMap& out, const Added& added, const Sizes& s, Tile tile, u32 buffers, int group, Block next,
    u32 a2, u32 b2
) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, line = warp * 16 + lane % 16;
  bool sender = threadIdx.x % 128 == 0;
#pragma unroll
  for (int block = 0; block < HIGH * (COLUMNS / 64); block++) {
    int row0 = tile.row + block / (COLUMNS / 64) * 64, column0 = tile.column + block % (COLUMNS / 64) * 64;
#if WHOLE
    float sum[32];
    if (PLUS && LATE) next = plus_at(added, s, row0, column0);
    scaled(sum, sums[block / (COLUMNS / 64)], block % (COLUMNS / 64), {added.by_row, added.by_column}, row0, column0, s.m, s.n);
    if (RANK) low_added(sum, a2 + block / (COLUMNS / 64) * BLOCK_BYTES, b2, column0 - tile.column);
#else
    float* sum = sums[block / (COLUMNS / 64)] + block % (COLUMNS / 64) * 32;
#endif
    u32 buffer = buffers + block % BUFFERS * BLOCK_BYTES;
    Block more = next;
    int after = block + 1;
    if (PLUS && !LATE && after < HIGH * (COLUMNS / 64))
      next = plus_at(added, s, tile.row + after / (COLUMNS / 64) * 64, tile.column + after % (COLUMNS / 64) * 64);
    if (sender) {
      if (block) sent<BUFFERS - 1>();
      else sent<0>();  // of the tile before, which need not have ended with the last buffer
    }
    warpgroup_sync(group + 1);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 made[4];
#pragma unroll
      for (int h = 0; h < 4; h++) {
        int i = j * 2 + h, column = column0 + (j + h / 2) * 8 + lane % 4 * 2;
        float2 x = make_float2(sum[2 * i], sum[2 * i + 1]);
        if (BIAS) x = both(x, pair_at(added.bias + column, column < s.n));
        if (PLUS) x = both(x, pair_in(more.pairs[i]));
        made[h] = packed(x.x, x.y);
      }
      put4(buffer + line * 128 + ((j + lane / 16 ^ line % 8) << 4), made);
    }
    show_to_sender();
    warpgroup_sync(group + 1);
    if (sender) send(out, buffer, column0, row0);
  }
}

// Where a block has what in shared memory, and its barriers: places for what comes, then the warpgroups' buffers.
struct Smem {
  u32 base, full, empty;
  __device__ Smem(const void* memory, const u64* barriers)
      : base((shared_at(memory) + 1023) & ~1023u), full(shared_at(barriers)), empty(full + 8 * STAGES) {}
  __device__ u32 buffers(int group) const { return base + STAGES * STAGE_BYTES + group * BUFFERS * BLOCK_BYTES; }
};

// Fetches what a tile is made of: both products' operands, one after another.
__device__ __forceinline__ void produce(
    const TensorMap& a, const TensorMap& b, const TensorMap& thin, const TensorMap& b2, const Sizes& s, const Smem& smem,
    Tile tile, u32 block, Place<STAGES>& at
) {
  int steps = (s.k + DEPTH - 1) / DEPTH, part = tile.column / s.part * RANK;
  for (int step = 0; step < steps + (RANK > 0); step++, at.next()) {
    u32 to = smem.base + at.stage * STAGE_BYTES, barrier = smem.full + 8 * at.stage;
    bool second = step == steps;
    wait(smem.empty + 8 * at.stage, at.phase ^ 1);
#if MADE
    expect(barrier, second ? B_BYTES : STAGE_BYTES);
    if (!second) {
      fetch(to, a, barrier, step * DEPTH, tile.row);
      fetch_thin(to + A_BYTES + B_BYTES, thin, barrier, step * DEPTH, part);
    }
#else
    expect(barrier, STAGE_BYTES);
    fetch(to, second ? thin : a, barrier, second ? part : step * DEPTH, tile.row);
#endif
    if (WHOLE && !second) fetch_half<false>(to + A_BYTES, b, barrier, step * DEPTH, tile.column, block);
    else fetch_half<ACROSS>(to + A_BYTES, second ? b2 : b, barrier, second ? 0 : step * DEPTH, tile.column, block);
  }
}

// A warpgroup's rows of a tile: both products, then the stores. A stage's buffers are released, by the first two
// threads to a block of the cluster each, when the products that read them are over.
__device__ __forceinline__ void consume(
    const TensorMap& out, const Added& added, const Sizes& s, const Smem& smem, Tile tile, int group, Place<STAGES>& at
) {
  u32 thread = threadIdx.x % 128, before = 0, own = smem.base + group * HIGH * BLOCK_BYTES;
  int steps = (s.k + DEPTH - 1) / DEPTH;
  Sums sums;
#if MADE
  Hidden hidden;
#endif
#pragma unroll
  for (int split = 0; split < SPLITS; split++)
    for (int step = 0; step < steps / SPLITS; step++, at.next()) {
      wait(smem.full + 8 * at.stage, at.phase);
      u32 left = own + at.stage * STAGE_BYTES, right = smem.base + at.stage * STAGE_BYTES + A_BYTES;
      bool begun = split > 0 || step > 0;
#if MADE
      multiply_both(sums, hidden, split, left, right, right + B_BYTES, begun, step > 0);
#elif WHOLE
      multiply_whole(sums, left, right, begun);
#else
      multiply<DEPTH / 16>(sums, left, right, begun);
#endif
      products_done<1>();
      if (thread < 2 && begun) arrive_at(smem.empty + 8 * before, thread);
      before = at.stage;
    }
#if WHOLE
  products_done<0>();
  if (thread < 2) arrive_at(smem.empty + 8 * before, thread);
#endif
  Block more = {};
  if (added.plus) more = plus_at(added, s, tile.row, tile.column);
  u32 a2 = own + at.stage * STAGE_BYTES, b2 = smem.base + at.stage * STAGE_BYTES + A_BYTES;
#if WHOLE
  if (RANK) wait(smem.full + 8 * at.stage, at.phase);
#else
  wait(smem.full + 8 * at.stage, at.phase);
#if MADE
  products_done<0>();
  bool stores = tile.column % s.part == 0;
  multiply_hidden(
      sums, hidden, b2, added, s.m, tile.row,
      stores ? tile.column / s.part * RANK : -1);
#else
  multiply<RANK / 16>(sums, a2, b2, 1);
#endif
  products_done<0>();
  if (thread < 2) arrive_at(smem.empty + 8 * before, thread), arrive_at(smem.empty + 8 * at.stage, thread);
  at.next();
#endif
  u32 buffers = smem.buffers(group);
  if (!GROUP && added.bias)
    if (added.plus) finish<true, true>(sums, out, added, s, tile, buffers, group, more, a2, b2);
    else finish<true, false>(sums, out, added, s, tile, buffers, group, more, a2, b2);
  else if (added.plus) finish<false, true>(sums, out, added, s, tile, buffers, group, more, a2, b2);
  else finish<false, false>(sums, out, added, s, tile, buffers, group, more, a2, b2);
#if WHOLE && RANK
  warpgroup_sync(group + 1);  // all have read what is given back
  if (thread < 2) arrive_at(smem.empty + 8 * at.stage, thread);
  at.next();
#endif
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) paired_product(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap thin,
    const __grid_constant__ TensorMap b2, const __grid_constant__ TensorMap out, const Added added, const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  Smem smem(memory, barriers);
  Tiles tiles(s);
  Place<STAGES> at;
  u32 block = blockIdx.x % 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++)
      begin_barrier(smem.full + 8 * i, 1), begin_barrier(smem.empty + 8 * i, 2 * CONSUMERS);
    show_barriers();
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONSUMERS < 3 ? 40 : 32));
    if (threadIdx.x == 0)
      for (int i = blockIdx.x / 2; i < tiles.count(); i += gridDim.x / 2)
        produce(a, b, thin, b2, s, smem, tiles.at(i, block), block, at);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMERS < 3 ? 232 : 160));
    int group = threadIdx.x / 128 - 1;
    for (int i = blockIdx.x / 2; i < tiles.count(); i += gridDim.x / 2) {
      Tile tile = tiles.at(i, block);
      tile.row += group * 64 * HIGH;
      consume(out, added, s, smem, tile, group, at);
    }
    sent<0>();
  }
  cluster_sync();
}
