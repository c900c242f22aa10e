// Attention with dropout by products of warps (compute capability 8.0): what forward and gradients share.
//
// A block owns rows of one side, such as queries, and goes through the tiles of the other side. Each of its warps has
// 16 * M of the rows. Scores are a warp's sums, which it drops and makes weights of without leaving registers.
//
// Contract: HEAD is at least E and V, which are multiples of 8. q and g are (B, heads, L, E or V), k and v (B, heads /
// group, S, E or V). Rows are dense and lie at multiples of 16 bytes; distances are in elements. mask, if not null, is
// added to the scores, and bars by minus infinity. Its rows are dense, with room for whole multiples of 128 keys. lengths,
// if not null, say how many keys each sample has. A probability is kept, times `kept`, where its random word is at least
// `limit`. That is word (head * L + query) * ceil(S / 4) * 4 + key of what engine/random.py draws for (seed, stream, step,
// sample). The step is at `step` or, where that is null, `host_step`. Grid: blocks of own rows times heads. Outputs are
// assigned (=). Each sum has one owner and a fixed order: equal inputs give equal bits.
#pragma once
#include "backend/cuda/copy_async.cuh"
#include "backend/cuda/mma.cuh"
#include "philox.cuh"

#define INF __int_as_float(0x7f800000)

const int D = HEAD, WARPS = 4, THREADS = 32 * WARPS, ROW_BYTES = 2 * D;

struct Rows {
  T* at;
  long long batch, head, row;
  __device__ T* of(int b, int h) const { return at + b * batch + h * head; }
};
struct Problem {
  Rows q, k, v, g, out, out2;
  Keys seed;
  float* rows;
  const T* mask;
  const int* lengths;
  const long long *samples, *step;
  long long host_step, stream, mask_batch, mask_head, mask_query;
  int causal, heads, group, L, S, E, V;
  float scale;
  unsigned limit;
  float kept;
  // How many keys a sample has
  __device__ int keys_of(int batch) const { return lengths ? min(S, lengths[batch]) : S; }
};

// One counter has the words of four keys in a row. A thread has columns 2 t and 2 t + 1 of two neighbouring sums, which are
// to be such four. So the keys of each sixteen lie in shared memory in an order of their own.
__device__ __forceinline__ int place_of(int key) { return key & ~15 | (key & 2) << 2 | (key & 12) >> 1 | key & 1; }
__device__ __forceinline__ int key_at(int place) { return place & ~15 | (place & 6) << 1 | (place & 8) >> 2 | place & 1; }

// Eight columns of a row in shared memory, where eight rows' are in different banks.
__device__ __forceinline__ u32 packet(int row, int eighth) { return row * ROW_BYTES + ((eighth ^ row & 7) << 4); }

// COUNT rows from `row` on to shared memory, zeros beyond the edges, where nothing is read
template <int COUNT, bool KEYS>
__device__ __forceinline__ void fetch(u32 to, const T* from, long long distance, int rows, int row, int width) {
  const int PACKETS = D / 8, EACH = THREADS / PACKETS;
  int first = threadIdx.x / PACKETS, c = threadIdx.x % PACKETS, left = c * 8 < width ? rows - row - first : 0;
  from += (row + first) * distance + c * 8;
#pragma unroll
  for (int n = 0; n < COUNT; n += EACH, from += EACH * distance)
    copy_or_zeros(to + packet(KEYS ? place_of(first + n) : first + n, c), from, n < left);
}

// sums[i][n] += rows 16 * i on of `a` times rows 8 * n on of `b`, along their columns
template <int M, int N> __device__ __forceinline__ void along(float (&sums)[M][N][4], u32 a, u32 b) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    u32 left[M][4], right[4];
#pragma unroll
    for (int i = 0; i < M; i++) matrices(left[i], a + packet(16 * i + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      matrices(right, b + packet(8 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < M; i++) {
        multiply(sums[i][n], left[i], right[0], right[1], T());
        multiply(sums[i][n + 1], left[i], right[2], right[3], T());
      }
    }
  }
}

// sums[i][n] += weights of 16 rows times columns 8 * n on of `b`, whose rows they weigh
template <int M, int K> __device__ __forceinline__ void across(float (&sums)[M][D / 8][4], const u32 (&weights)[M][K][4], u32 b) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      u32 right[4];
      matrices_across(right, b + packet(16 * k + lane % 16, n + lane / 16));
#pragma unroll
      for (int i = 0; i < M; i++) {
        multiply(sums[i][n], weights[i][k], right[0], right[1], T());
        multiply(sums[i][n + 1], weights[i][k], right[2], right[3], T());
      }
    }
}

// Sums as the left operand of `across`
template <int M, int N> __device__ __forceinline__ void weigh(u32 (&weights)[M][N / 2][4], const float (&s)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
      for (int e = 0; e < 4; e++) weights[i][k][e] = packed(s[i][2 * k + e / 2][e % 2 * 2], s[i][2 * k + e / 2][e % 2 * 2 + 1]);
}

template <int M, int N> __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[i][n][e] = 0.f;
}

// The products of a warp's rows with others, with masks and edges. `row` and `col` are the first of both. Rows are queries,
// or keys if BY_KEY. The sample has `keys` keys. What is left is to multiply by the scale, which is above 0.
template <bool BY_KEY, int M, int N>
__device__ __forceinline__ void bar(
    float (&s)[M][N][4], const Problem& p, int batch, int head, int keys, int row, int col
) {
  const int KEYS = BY_KEY ? 16 * M : 8 * N;
  int query = BY_KEY ? col : row, key = BY_KEY ? row : col, lane = threadIdx.x % 32;
  bool edge = key + KEYS > keys || (p.causal && key + KEYS - 1 > query);
  float more_of_scale = 1.f / p.scale;
  const T* mask = p.mask + batch * p.mask_batch + head * p.mask_head;
  auto each = [&](auto change) {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          int own = 16 * i + lane / 4 + e / 2 * 8, other = 8 * n + lane % 4 * 2 + e % 2;
          change(s[i][n][e], query + (BY_KEY ? other : own), key + key_at(BY_KEY ? own : other));
        }
  };
  if (p.mask)
    each([&](float& x, int a, int b) {
      float more = to_float(mask[min(a, p.L - 1) * p.mask_query + b]);
      x = more == -INF ? -INF : fmaf(more, more_of_scale, x);
    });
  if (edge)
    each([&](float& x, int a, int b) {
      if (b >= keys || (p.causal && b > a)) x = -INF;
    });
}

// The random words of a sample's probabilities
struct Words {
  const Keys& seed;
  u32 step, sample, stream, per_row;
  __device__ Words(const Problem& p, int batch)
      : seed(p.seed), step(p.step ? *p.step : p.host_step), sample(p.samples[batch]), stream(p.stream),
        per_row((p.S + 3) / 4) {}
  // Of four keys of a row, which is head * L + query
  __device__ uint4 of(u32 row, int key) const { return philox(row * per_row + key / 4, step, sample, stream, seed); }
};

// A warp's rows from `row` on, times a factor each, to memory; keys in their own order
template <bool KEYS, int M>
__device__ __forceinline__ void leave(
    const float (&sums)[M][D / 8][4], const float (&factors)[M][2], T* to, long long distance, int row, int rows, int width
) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int place = 16 * i + lane / 4 + 8 * h, own = row + (KEYS ? key_at(place) : place);
      if (own >= rows) continue;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        if (8 * n < width)
          *reinterpret_cast<u32*>(to + own * distance + 8 * n + lane % 4 * 2) =
              packed(sums[i][n][2 * h] * factors[i][h], sums[i][n][2 * h + 1] * factors[i][h]);
    }
}

#define KERNEL(NAME, RUN)                                                                                             \
  extern "C" __global__ void __launch_bounds__(128, 2) NAME(                                                          \
      T* q, long long q_batch, long long q_head, long long q_row, T* k, long long k_batch, long long k_head,          \
      long long k_row, T* v, long long v_batch, long long v_head, long long v_row, T* g, long long g_batch,           \
      long long g_head, long long g_row, T* out, long long out_batch, long long out_head, long long out_row, T* out2, \
      long long out2_batch, long long out2_head, long long out2_row, float* rows, const T* mask,                      \
      const int* lengths, const long long* samples, const long long* step, long long host_step, long long stream, const Keys seed,        \
      long long mask_batch, long long mask_head, long long mask_query, int causal, int heads, int group, int L,       \
      int S, int E, int V, float scale, unsigned limit, float kept) {                                                 \
    RUN({{q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row},                       \
         {g, g_batch, g_head, g_row}, {out, out_batch, out_head, out_row}, {out2, out2_batch, out2_head, out2_row},   \
         seed, rows, mask, lengths, samples, step, host_step, stream, mask_batch, mask_head, mask_query, causal, heads, group, \
         L, S, E, V, scale, limit, kept});                                                                            \
  }
