// Gradients of LoRA factors: the two thin products of a layer, or of layers of one input, in one launch.
//
// Contract: a side has `count` products C_i = P_i^T Q_i over `rows` rows, P_i (rows, 16 * bands), Q_i (rows, width),
// width % 8 == 0, both 16-byte aligned with row strides p_row and q_row in elements, p_step and q_step apart. C_i is
// fp32 and dense, (16 * bands, width), or (width, 16 * bands) where `turned`, as the second side is and the first is
// not; where `adds` it is added to, else assigned. Sums are fp32 in a fixed order, so equal inputs give equal bits.
// Needs clusters: compute capability 9.0.
#include "warp_tiles.cuh"

constexpr int COLUMNS = 64, DEPTH = 32, STAGES = 6, THREADS = 2 * COLUMNS;  // 16 columns a warp
constexpr int P_PITCH = 16 + 8, Q_PITCH = COLUMNS + 8;  // of shared memory: eight rows lie in different banks
constexpr int TILE_PITCH = COLUMNS + 1;

struct Side {
  const T *p, *q;
  float* c;
  long long p_step, q_step, c_step;
  int p_row, q_row, bands, width, count, turned, adds;
  __device__ __forceinline__ int across() const { return (width + COLUMNS - 1) / COLUMNS; }
  __device__ __forceinline__ int tiles() const { return across() * bands * count; }
  // An element of a tile, counted along what lies together in C; and where it goes, or -1 beyond the edge.
  __device__ __forceinline__ int tile_row(int e) const { return turned ? e % 16 : e / COLUMNS; }
  __device__ __forceinline__ int tile_column(int e) const { return turned ? e / 16 : e % COLUMNS; }
  __device__ __forceinline__ long long place(int e, int column, int band) const {
    long long row = band * 16 + tile_row(e), c = column + tile_column(e);
    return c >= width ? -1 : turned ? c * 16 * bands + row : row * width + c;
  }
};

struct Stage {
  T p[DEPTH * P_PITCH], q[DEPTH * Q_PITCH];
};

__device__ __forceinline__ void fetch(
    Stage& s, const T* p, const T* q, const Side& side, int row, int last, int column) {
  int r = threadIdx.x / 2, c = threadIdx.x % 2 * 8;
  bool there = row + r < last;
  if (r < DEPTH) fetch16(s.p + r * P_PITCH + c, p + (there ? (size_t)(row + r) * side.p_row + c : 0), there);
#pragma unroll
  for (int i = 0; i < DEPTH * COLUMNS / 8 / THREADS; i++) {
    r = (threadIdx.x + i * THREADS) / (COLUMNS / 8), c = threadIdx.x % (COLUMNS / 8) * 8;
    there = row + r < last && column + c < side.width;
    fetch16(s.q + r * Q_PITCH + c, q + (there ? (size_t)(row + r) * side.q_row + column + c : 0), there);
  }
}

// One stage: each warp has 16 columns
__device__ __forceinline__ void take(const Stage& s, float (&sum)[2][4]) {
  int lane = threadIdx.x % 32, row = lane % 8, part = lane / 8, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    unsigned a[4], b[4];
    turned4(a, s.p + (k + row + part / 2 * 8) * P_PITCH + part % 2 * 8);
    turned4(b, s.q + (k + row + part % 2 * 8) * Q_PITCH + warp * 16 + part / 2 * 8);
    multiply<T>(sum[0], a, b);
    multiply<T>(sum[1], a, b + 2);
  }
}

// The sums of a 16 x COLUMNS tile over this block's rows, into shared memory
__device__ __forceinline__ void own_share(
    const T* p, const T* q, const Side& side, int first, int last, int column, float* tile) {
  __shared__ Stage stages[STAGES];
  float sum[2][4] = {};
  int steps = max(0, (last - first + DEPTH - 1) / DEPTH);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < steps) fetch(stages[i], p, q, side, first + i * DEPTH, last, column);
    asm volatile("cp.async.commit_group;");
  }
  for (int i = 0; i < steps; i++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    int next = i + STAGES - 1;
    if (next < steps) fetch(stages[next % STAGES], p, q, side, first + next * DEPTH, last, column);
    asm volatile("cp.async.commit_group;");
    take(stages[i % STAGES], sum);
  }
  int lane = threadIdx.x % 32;
  float* to = tile + lane / 4 * TILE_PITCH + threadIdx.x / 32 * 16 + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[e / 2 * 8 * TILE_PITCH + n * 8 + e % 2] = sum[n][e];
}

// A cluster of SHARE blocks has a tile, each with its part of the rows; they add up among them.
template <int SHARE> __device__ __forceinline__ void product(const Side& side, int index, int rows, int span) {
  __shared__ float tile[16 * TILE_PITCH];
  int column = index % side.across() * COLUMNS, above = index / side.across();
  int band = above % side.bands, item = above / side.bands;
  float* to = side.c + item * side.c_step;
  for (int e = blockIdx.y * THREADS + threadIdx.x; side.adds && e < 16 * COLUMNS; e += SHARE * THREADS)
    if (long long at = side.place(e, column, band); at >= 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(to + at));
  int first = blockIdx.y * span, last = min(first + span, rows);
  own_share(side.p + item * side.p_step + band * 16, side.q + item * side.q_step, side, first, last, column, tile);
  everyone();
  for (int e = blockIdx.y * THREADS + threadIdx.x; e < 16 * COLUMNS; e += SHARE * THREADS) {
    float total = 0.f;
#pragma unroll
    for (int block = 0; block < SHARE; block++)
      total += theirs(tile + side.tile_row(e) * TILE_PITCH + side.tile_column(e), block);
    long long at = side.place(e, column, band);
    if (at >= 0) to[at] = side.adds ? to[at] + total : total;
  }
  everyone();
}

// grid (tiles of both sides, SHARE)
#define KERNEL(NAME, SHARE)                                                                                       \
  extern "C" __cluster_dims__(1, SHARE, 1) __global__ void __launch_bounds__(THREADS)                             \
      NAME(const T* p0, const T* q0, float* c0, long long p_step0, long long q_step0, long long c_step0,          \
           int p_row0, int q_row0, int bands0, int width0, int count0, int adds0, const T* p1, const T* q1,       \
           float* c1, long long p_step1, long long q_step1, long long c_step1, int p_row1, int q_row1,            \
           int bands1, int width1, int count1, int adds1, int rows, int span) {                                   \
    Side side = {p0, q0, c0, p_step0, q_step0, c_step0, p_row0, q_row0, bands0, width0, count0, 0, adds0};        \
    int index = blockIdx.x, before = side.tiles();                                                                \
    if (index >= before) {                                                                                        \
      side = {p1, q1, c1, p_step1, q_step1, c_step1, p_row1, q_row1, bands1, width1, count1, 1, adds1};           \
      index -= before;                                                                                            \
    }                                                                                                             \
    product<SHARE>(side, index, rows, span);                                                                      \
  }
KERNEL(lora_gradients_4, 4)
KERNEL(lora_gradients_8, 8)
