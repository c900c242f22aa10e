// Attention with dropout, forward (FlashAttention-2, arXiv 2307.08691): a block owns OWN queries of a head. `out` is the
// output. `rows` become the log-sum-exps, fp32 (B, heads, L), +inf for a query that may look nowhere, whose output is 0.
#include "ops/attention/mma.cuh"

// A tile's scores become exponentials, against the largest score of their row so far. What was summed up before shrinks.
// `total` is the sum of a row's exponentials in a thread's columns.
template <int N>
__device__ __forceinline__ void soften(
    float (&s)[N][4], float (&sums)[D / 8][4], float (&top)[2], float (&total)[2], float scale
) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float high = top[h];
#pragma unroll
    for (int n = 0; n < N; n++) high = fmaxf(high, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    high = of_row(high, false);
    float base = high == -INF ? 0.f : high * scale, less = exp2_of(fmaf(top[h], scale, -base));
    top[h] = high, total[h] *= less;
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][2 * h] *= less, sums[n][2 * h + 1] *= less;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; e++) total[h] += s[n][e] = exp2_of(fmaf(s[n][e], scale, -base));
  }
}

__device__ __forceinline__ void forward(const Problem& p) {
  const int M = 2, OWN = 16 * M * WARPS, TILE = 4096 / D, N = TILE / 8, TILE_BYTES = TILE * ROW_BYTES;
  extern __shared__ unsigned char memory[];
  int blocks = (p.L + OWN - 1) / OWN, row = (blocks - 1 - blockIdx.x % blocks) * OWN;  // later queries see more
  int batch = blockIdx.x / blocks / p.heads, head = blockIdx.x / blocks % p.heads, lane = threadIdx.x % 32;
  const T *k = p.k.of(batch, head / p.group), *v = p.v.of(batch, head / p.group);
  u32 own = shared_at(memory), stage = own + OWN * ROW_BYTES, other = stage + 2 * TILE_BYTES;
  int keys = p.keys_of(batch);
  Words words(p, batch);
  float scale = p.scale * LOG2E;
  fetch<OWN, false>(own, p.q.of(batch, head), p.q.row, p.L, row, p.E);
  fetch<TILE, true>(stage, k, p.k.row, keys, 0, p.E);
  fetch<TILE, true>(stage + TILE_BYTES, v, p.v.row, keys, 0, p.V);
  copies_end();
  int first = threadIdx.x / 32 * 16 * M, last = p.causal ? min(keys, row + OWN) : keys;
  own += first * ROW_BYTES, row += first;
  float sums[M][D / 8][4], top[M][2], total[M][2];
  clear(sums);
#pragma unroll
  for (int i = 0; i < M; i++) top[i][0] = top[i][1] = -INF, total[i][0] = total[i][1] = 0.f;
#pragma unroll 1
  for (int col = 0; col < last; col += TILE) {
    copies_wait<0>();
    __syncthreads();  // the tile has come, and the one before has been read
    if (col + TILE < last) {
      fetch<TILE, true>(other, k, p.k.row, keys, col + TILE, p.E);
      fetch<TILE, true>(other + TILE_BYTES, v, p.v.row, keys, col + TILE, p.V);
      copies_end();
    }
    float s[M][N][4];
    u32 weights[M][N / 2][4];
    clear(s);
    along(s, own, stage);
    bar<false>(s, p, batch, head, keys, row, col);
#pragma unroll
    for (int i = 0; i < M; i++) {
      soften(s[i], sums[i], top[i], total[i], scale);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          uint4 w = words.of(head * p.L + row + 16 * i + lane / 4 + 8 * h, col + 8 * n + lane % 4 * 4);
          if (w.x < p.limit) s[i][n][2 * h] = 0.f;
          if (w.y < p.limit) s[i][n][2 * h + 1] = 0.f;
          if (w.z < p.limit) s[i][n + 1][2 * h] = 0.f;
          if (w.w < p.limit) s[i][n + 1][2 * h + 1] = 0.f;
        }
    }
    weigh<M, N>(weights, s);
    across(sums, weights, stage + TILE_BYTES);
    u32 next = other;
    other = stage, stage = next;
  }
  float factors[M][2];
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float all = of_row(total[i][h], true);
      int query = row + 16 * i + lane / 4 + 8 * h;
      factors[i][h] = all == 0.f ? 0.f : p.kept / all;
      if (lane % 4 == 0 && query < p.L)
        p.rows[((long long)batch * p.heads + head) * p.L + query] = all == 0.f ? INF : fmaf(top[i][h], p.scale, logf(all));
    }
  leave<false>(sums, factors, p.out.of(batch, head), p.out.row, row, p.L, p.V);
}
KERNEL(dropout_forward, forward)
