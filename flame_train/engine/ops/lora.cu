// Gradients of LoRA factors: the two thin products of a layer, or of layers of one input, in one launch.
//
// Contract: a side has `count` products C_i = P_i^T Q_i over `rows` rows, P_i (rows, 16 * bands), Q_i (rows, width),
// width % 8 == 0, both 16-byte aligned with row strides p_row and q_row in elements, p_step and q_step apart. C_i is
// fp32 and dense, (16 * bands, width), or (width, 16 * bands) where `turned`, as the second side is and the first is
// not; where `adds` it is added to, else assigned. Sums are fp32 in a fixed order, so equal inputs give equal bits.
// Needs clusters: compute capability 9.0.
#include "warp_tiles.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int P_PITCH = 16 + 8;  // of shared memory: eight rows lie in different banks

// A tile's columns, and the rows of a stage, of which several are on their way.
template <int C, int D, int S> struct Cut {
  static constexpr int columns = C, depth = D, stages = S, q_pitch = C + 8, tile_pitch = C + 1;
  struct Stage {
    T p[D * P_PITCH], q[D * q_pitch];
  };
  union Shared {  // the sums come when the last stage is done with
    Stage stage[S];
    float tile[16 * tile_pitch];
  };
};

struct Side {
  const T *p, *q;
  float* c;
  long long p_step, q_step, c_step;
  int p_row, q_row, bands, width, count, turned, adds;
  __device__ __forceinline__ int across(int columns) const { return (width + columns - 1) / columns; }
  __device__ __forceinline__ int tiles(int columns) const { return across(columns) * bands * count; }
  // An element of a tile, counted along what lies together in C; and where it goes, or -1 beyond the edge.
  __device__ __forceinline__ int tile_row(int e, int columns) const { return turned ? e % 16 : e / columns; }
  __device__ __forceinline__ int tile_column(int e, int columns) const { return turned ? e / 16 : e % columns; }
  __device__ __forceinline__ long long place(int e, int columns, int column, int band) const {
    long long row = band * 16 + tile_row(e, columns), c = column + tile_column(e, columns);
    return c >= width ? -1 : turned ? c * 16 * bands + row : row * width + c;
  }
};

template <class C> __device__ __forceinline__ void fetch(
    typename C::Stage& s, const T* p, const T* q, const Side& side, int row, int last, int column) {
  int r = threadIdx.x / 2, c = threadIdx.x % 2 * 8;
  bool there = row + r < last;
  if (r < C::depth) fetch16(s.p + r * P_PITCH + c, p + (there ? (size_t)(row + r) * side.p_row + c : 0), there);
#pragma unroll
  for (int i = 0; i < C::depth * C::columns / 8 / THREADS; i++) {
    r = (threadIdx.x + i * THREADS) / (C::columns / 8), c = threadIdx.x % (C::columns / 8) * 8;
    there = row + r < last && column + c < side.width;
    fetch16(s.q + r * C::q_pitch + c, q + (there ? (size_t)(row + r) * side.q_row + column + c : 0), there);
  }
}

// One stage: each warp has its part of the columns
template <class C> __device__ __forceinline__ void take(
    const typename C::Stage& s, float (&sum)[C::columns / WARPS / 8][4]) {
  constexpr int OWN = C::columns / WARPS;
  int lane = threadIdx.x % 32, row = lane % 8, part = lane / 8, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < C::depth; k += 16) {
    unsigned a[4], b[4];
    turned4(a, s.p + (k + row + part / 2 * 8) * P_PITCH + part % 2 * 8);
#pragma unroll
    for (int n = 0; n < OWN; n += 16) {
      turned4(b, s.q + (k + row + part % 2 * 8) * C::q_pitch + warp * OWN + n + part / 2 * 8);
      multiply<T>(sum[n / 8], a, b);
      multiply<T>(sum[n / 8 + 1], a, b + 2);
    }
  }
}

// The sums of a tile, 16 rows of C, over this block's rows, into shared memory
template <class C> __device__ __forceinline__ void own_share(
    const T* p, const T* q, const Side& side, int first, int last, int column, typename C::Shared& shared) {
  constexpr int OWN = C::columns / WARPS;
  float sum[OWN / 8][4] = {};
  int steps = max(0, (last - first + C::depth - 1) / C::depth);
#pragma unroll
  for (int i = 0; i < C::stages - 1; i++) {
    if (i < steps) fetch<C>(shared.stage[i], p, q, side, first + i * C::depth, last, column);
    asm volatile("cp.async.commit_group;");
  }
  for (int i = 0; i < steps; i++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(C::stages - 2) : "memory");
    __syncthreads();
    int next = i + C::stages - 1;
    if (next < steps)
      fetch<C>(shared.stage[next % C::stages], p, q, side, first + next * C::depth, last, column);
    asm volatile("cp.async.commit_group;");
    take<C>(shared.stage[i % C::stages], sum);
  }
  __syncthreads();
  int lane = threadIdx.x % 32;
  float* to = shared.tile + lane / 4 * C::tile_pitch + threadIdx.x / 32 * OWN + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < OWN / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[e / 2 * 8 * C::tile_pitch + n * 8 + e % 2] = sum[n][e];
}

// A cluster of SHARE blocks has a tile, each with its part of the rows; they add up among them.
template <class C, int SHARE> __device__ __forceinline__ void product(
    const Side& side, int index, int rows, int span) {
  constexpr int COLUMNS = C::columns;
  __shared__ __align__(16) typename C::Shared shared;
  int across = side.across(COLUMNS), column = index % across * COLUMNS, above = index / across;
  int band = above % side.bands, item = above / side.bands;
  float* to = side.c + item * side.c_step;
  for (int e = blockIdx.y * THREADS + threadIdx.x; side.adds && e < 16 * COLUMNS; e += SHARE * THREADS)
    if (long long at = side.place(e, COLUMNS, column, band); at >= 0)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(to + at));
  int first = blockIdx.y * span, last = min(first + span, rows);
  own_share<C>(
      side.p + item * side.p_step + band * 16, side.q + item * side.q_step, side, first, last, column, shared);
  everyone();
  for (int e = blockIdx.y * THREADS + threadIdx.x; e < 16 * COLUMNS; e += SHARE * THREADS) {
    const float* own = shared.tile + side.tile_row(e, COLUMNS) * C::tile_pitch + side.tile_column(e, COLUMNS);
    float total = 0.f;
#pragma unroll
    for (int block = 0; block < SHARE; block++) total += theirs(own, block);
    long long at = side.place(e, COLUMNS, column, band);
    if (at >= 0) to[at] = side.adds ? to[at] + total : total;
  }
  everyone();
}

// grid (tiles of both sides, SHARE)
#define KERNEL(NAME, SHARE, CUT)                                                                                  \
  extern "C" __cluster_dims__(1, SHARE, 1) __global__ void __launch_bounds__(THREADS)                             \
      NAME(const T* p0, const T* q0, float* c0, long long p_step0, long long q_step0, long long c_step0,          \
           int p_row0, int q_row0, int bands0, int width0, int count0, int adds0, const T* p1, const T* q1,       \
           float* c1, long long p_step1, long long q_step1, long long c_step1, int p_row1, int q_row1,            \
           int bands1, int width1, int count1, int adds1, int rows, int span) {                                   \
    Side side = {p0, q0, c0, p_step0, q_step0, c_step0, p_row0, q_row0, bands0, width0, count0, 0, adds0};        \
    int index = blockIdx.x, before = side.tiles(CUT::columns);                                                    \
    if (index >= before) {                                                                                        \
      side = {p1, q1, c1, p_step1, q_step1, c_step1, p_row1, q_row1, bands1, width1, count1, 1, adds1};           \
      index -= before;                                                                                            \
    }                                                                                                             \
    product<CUT, SHARE>(side, index, rows, span);                                                                 \
  }
using Narrow = Cut<64, 32, 6>;
using Wide = Cut<128, 16, 8>;
KERNEL(lora_gradients_128_4, 4, Wide)
KERNEL(lora_gradients_64_4, 4, Narrow)
KERNEL(lora_gradients_64_8, 8, Narrow)
