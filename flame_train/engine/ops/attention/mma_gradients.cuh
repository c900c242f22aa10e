// Gradients of attention with dropout (FlashAttention, arXiv 2205.14135, appendix B.4), by two kernels. Each finds p = exp(s
// - lse) and ds = p (z g.v - drop) for itself, z being 0 or `kept`. One's block owns queries and weighs keys by ds: `out`
// is dq. The other's owns keys. It weighs queries by ds and rows of g by p z: `out` is dk, `out2` dv.
//
// `rows` are those that factors.cu fills: of 64 queries -lse in units of log 2, then -drop; minus infinity and 0 where there
// is no query.
#include "ops/attention/mma.cuh"

const int FACTORS = 64;

__device__ __forceinline__ const float* factors_of(const Problem& p, int batch, int head, int query) {
  long long heads = (long long)batch * p.heads + head;
  return p.rows + (heads * ((p.L + FACTORS - 1) / FACTORS) + query / FACTORS) * 2 * FACTORS + query % FACTORS;
}

__device__ __forceinline__ void of_queries(const Problem& p) {
  const int M = 2, OWN = 16 * M * WARPS, N = 4, TILE = 8 * N, TILE_BYTES = TILE * ROW_BYTES;
  extern __shared__ unsigned char memory[];
  int blocks = (p.L + OWN - 1) / OWN, row = (blocks - 1 - blockIdx.x % blocks) * OWN;  // later queries see more
  int batch = blockIdx.x / blocks / p.heads, head = blockIdx.x / blocks % p.heads, lane = threadIdx.x % 32;
  const T *k = p.k.of(batch, head / p.group), *v = p.v.of(batch, head / p.group);
  u32 own = shared_at(memory), own_g = own + OWN * ROW_BYTES, stage = own_g + OWN * ROW_BYTES, other = stage + 2 * TILE_BYTES;
  int keys = p.keys_of(batch);
  Words words(p, batch);
  float scale = p.scale * LOG2E;
  fetch<OWN, false>(own, p.q.of(batch, head), p.q.row, p.L, row, p.E);
  fetch<OWN, false>(own_g, p.g.of(batch, head), p.g.row, p.L, row, p.V);
  fetch<TILE, true>(stage, k, p.k.row, keys, 0, p.E);
  fetch<TILE, true>(stage + TILE_BYTES, v, p.v.row, keys, 0, p.V);
  copies_end();
  int first = threadIdx.x / 32 * 16 * M, last = p.causal ? min(keys, row + OWN) : keys;
  own += first * ROW_BYTES, own_g += first * ROW_BYTES, row += first;
  float sums[M][D / 8][4], factor[M][2], drop[M][2];
  clear(sums);
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int query = row + 16 * i + lane / 4 + 8 * h;
      const float* f = factors_of(p, batch, head, min(query, p.L - 1));
      factor[i][h] = f[0], drop[i][h] = f[FACTORS];
    }
#pragma unroll 1
  for (int col = 0; col < last; col += TILE) {
    copies_wait<0>();
    __syncthreads();  // the tile has come, and the one before has been read
    if (col + TILE < last) {
      fetch<TILE, true>(other, k, p.k.row, keys, col + TILE, p.E);
      fetch<TILE, true>(other + TILE_BYTES, v, p.v.row, keys, col + TILE, p.V);
      copies_end();
    }
    float s[M][N][4], dp[M][N][4];
    u32 weights[M][N / 2][4];
    clear(s);
    along(s, own, stage);
    bar<false>(s, p, batch, head, keys, row, col);
    clear(dp);
    along(dp, own_g, stage + TILE_BYTES);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          uint4 w = words.of(head * p.L + row + 16 * i + lane / 4 + 8 * h, col + 8 * n + lane % 4 * 4);
          u32 four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float& x = s[i][n + e / 2][2 * h + e % 2];
            float slope = four[e] < p.limit ? 0.f : dp[i][n + e / 2][2 * h + e % 2];
            x = exp2_of(fmaf(x, scale, factor[i][h])) * fmaf(slope, p.kept, drop[i][h]);
          }
        }
    weigh<M, N>(weights, s);
    across(sums, weights, stage);
    u32 next = other;
    other = stage, stage = next;
  }
  float factors[M][2];
#pragma unroll
  for (int i = 0; i < M; i++) factors[i][0] = factors[i][1] = p.scale;
  leave<false>(sums, factors, p.out.of(batch, head), p.out.row, row, p.L, p.E);
}
KERNEL(dropout_query, of_queries)

// Which of a warp's probabilities from `query`, of all heads, and `key` on are kept, a bit each. Two threads have the same four keys, two
// each, and the same two queries. Each draws the words of one of these, and they exchange them. A thread's own, of the
// sums i and n, row h and column c, is bit 4 * (N * i + n) + 2 * h of kept[c].
template <int M, int N>
__device__ __forceinline__ void draw(u32 (&kept)[2], const Words& words, u32 limit, u32 query, int key) {
  int lane = threadIdx.x % 32, odd = lane / 4 % 2;
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint4 w = words.of(query + 8 * n + lane % 4 * 2 + odd, key + 16 * i + lane / 8 * 4);
      u32 four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (four[e] >= limit) bits |= 1u << (4 * (N * i + n) + e);
    }
  u32 theirs = __shfl_xor_sync(0xffffffffu, bits, 4);
  kept[0] = (odd ? theirs : bits) >> odd;
  kept[1] = (odd ? bits : theirs) >> odd;
}

// Asks for TILE queries of a head with their rows of g and their factors.
template <int TILE> __device__ __forceinline__ void fetch_queries(u32 to, const Problem& p, int batch, int head, int query) {
  fetch<TILE, false>(to, p.q.of(batch, head), p.q.row, p.L, query, p.E);
  fetch<TILE, false>(to + TILE * ROW_BYTES, p.g.of(batch, head), p.g.row, p.L, query, p.V);
  const int PACKETS = TILE / 4;
  int i = threadIdx.x;
  const float* factors = factors_of(p, batch, head, query) + i / PACKETS * FACTORS + i % PACKETS * 4;
  if (i < 2 * PACKETS) copy_or_zeros(to + 2 * TILE * ROW_BYTES + 16 * i, factors, true);
  copies_end();
}

__device__ __forceinline__ void of_keys(const Problem& p) {
  const int M = D == 64 ? 2 : 1, OWN = 16 * M * WARPS;  // as many sums as registers have room for
  const int N = 8 / M, TILE = 8 * N, TILE_BYTES = TILE * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES + 8 * TILE;
  extern __shared__ unsigned char memory[];
  int blocks = (p.S + OWN - 1) / OWN, row = blockIdx.x % blocks * OWN, heads = p.heads / p.group, lane = threadIdx.x % 32;
  int batch = blockIdx.x / blocks / heads, head = blockIdx.x / blocks % heads;
  u32 own = shared_at(memory), own_v = own + OWN * ROW_BYTES, stage = own_v + OWN * ROW_BYTES, other = stage + STAGE_BYTES;
  int keys = p.keys_of(batch), first = p.causal ? row / TILE * TILE : 0;
  int each = row < keys ? max(0, (p.L - first + TILE - 1) / TILE) : 0, tiles = each * p.group;
  fetch<OWN, true>(own, p.k.of(batch, head), p.k.row, keys, row, p.E);
  fetch<OWN, true>(own_v, p.v.of(batch, head), p.v.row, keys, row, p.V);
  int query_head = head * p.group, col = first;
  if (tiles) fetch_queries<TILE>(stage, p, batch, query_head, col);
  Words words(p, batch);
  float scale = p.scale * LOG2E;
  int ahead = threadIdx.x / 32 * 16 * M;
  own += ahead * ROW_BYTES, own_v += ahead * ROW_BYTES, row += ahead;
  float dk[M][D / 8][4], dv[M][D / 8][4];
  clear(dk), clear(dv);
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    copies_wait<0>();
    __syncthreads();  // the tile has come, and the one before has been read
    bool over = col + TILE >= p.L;
    int next_head = over ? query_head + 1 : query_head, next = over ? first : col + TILE;
    if (tile + 1 < tiles) fetch_queries<TILE>(other, p, batch, next_head, next);
    float s[M][N][4], dp[M][N][4];
    u32 weights[M][N / 2][4], kept[2];
    draw<M, N>(kept, words, p.limit, query_head * p.L + col, row);
    clear(s);
    along(s, own, stage);
    bar<true>(s, p, batch, query_head, keys, row, col);
    clear(dp);
    along(dp, own_v, stage + TILE_BYTES);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
      for (int n = 0; n < N; n++) {
        float2 factor = pair_from(stage + 2 * TILE_BYTES + 4 * (8 * n + lane % 4 * 2));
        float2 drop = pair_from(stage + 2 * TILE_BYTES + 4 * (TILE + 8 * n + lane % 4 * 2));
#pragma unroll
        for (int e = 0; e < 4; e++) {
          bool there = static_cast<int>(kept[e % 2] << (31 - 4 * (N * i + n) - e / 2 * 2)) < 0;
          float x = exp2_of(fmaf(s[i][n][e], scale, e % 2 ? factor.y : factor.x));
          s[i][n][e] = there ? x : 0.f;
          dp[i][n][e] = x * fmaf(there ? dp[i][n][e] : 0.f, p.kept, e % 2 ? drop.y : drop.x);
        }
      }
    weigh<M, N>(weights, s);
    across(dv, weights, stage + TILE_BYTES);
    weigh<M, N>(weights, dp);
    across(dk, weights, stage);
    u32 last = stage;
    stage = other, other = last, query_head = next_head, col = next;
  }
  float factors[M][2], factors2[M][2];
#pragma unroll
  for (int i = 0; i < M; i++) factors[i][0] = factors[i][1] = p.scale, factors2[i][0] = factors2[i][1] = p.kept;
  leave<true>(dk, factors, p.out.of(batch, head), p.out.row, row, p.S, p.E);
  leave<true>(dv, factors2, p.out2.of(batch, head), p.out2.row, row, p.S, p.V);
}
KERNEL(dropout_key_value, of_keys)
