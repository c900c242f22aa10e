// Gradients of attention for heads of 64 by warpgroups (compute capability 9.0), in one order of sums, the same in every run.
//
// With s = scale q k^T, p = exp(s - lse) and ds = p (g v^T - drop), where drop = sum(g out) of each query: dq = scale ds k,
// dk = scale ds^T q, dv = p^T g (FlashAttention, appendix B.2). Two kinds of blocks find p and ds for themselves, seven
// products where five would do, so that nothing is added up in memory: those of ROWS keys go through all queries and make dk
// and dv, those of ROWS queries go through all keys and make dq.
//
// query and g are (B, H, L, 64), key and value (B, H, S, 64), by their maps in tiles of TILE rows; T is bf16 or fp16, sums are
// fp32, p and ds are rounded to T where products read them. `factors` are (B H, tiles of queries, 2, TILE) fp32, -lse in units
// of log 2 and -drop, which attention_factors fills: minus infinity and 0 where there is no query.
//
// A block's first warpgroup fetches, CONSUMERS others have TILE rows each. While p is found of one tile, the tensor cores make
// what the one before gives and the other operand of its ds. Grid: blocks of keys, then of queries; THREADS a block.
#include "hopper.cuh"

constexpr int TILE = 64, HEAD = 64, CONSUMERS = 2, ROWS = TILE * CONSUMERS, THREADS = 128 * (CONSUMERS + 1), STAGES = 4;
constexpr u32 TILE_BYTES = TILE * HEAD * 2, FACTOR_BYTES = TILE * 4, STAGE_BYTES = 2 * TILE_BYTES, OWN_BYTES = 2 * ROWS * HEAD * 2;
constexpr float LOG2E = 1.4426950408889634f;

struct Rows { T* at; long long batch, head, row; };
struct Sizes { int batches, heads, queries, keys; float scale; };

__device__ __forceinline__ int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float2 pair_from(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}

// A left operand of 64 rows of 64, from shared memory to registers.
__device__ __forceinline__ void hold(u32 (&held)[16], u32 at) {
  u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < 4; k++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(held[4 * k]), "=r"(held[4 * k + 1]), "=r"(held[4 * k + 2]), "=r"(held[4 * k + 3])
                 : "r"(at + row * 128 + ((k * 2 + lane / 16 ^ row % 8) << 4)));
}

// sums = a b^T for a tile b, or sums += a b.
__device__ __forceinline__ void scores(float (&sums)[32], const u32 (&a)[16], u32 b) {
  along_fresh(sums, a, operand(b));
#pragma unroll
  for (int k = 1; k < 4; k++) along(sums, a + 4 * k, operand(b + k * 32));
}
__device__ __forceinline__ void add(float (&sums)[32], const u32 (&a)[16], u32 b) {
#pragma unroll
  for (int k = 0; k < 4; k++) across(sums, a + 4 * k, operand(b + k * 16 * 128));
}

// What a block owns and what passes it: keys and values by which queries and gradients pass, or the other way round.
struct Way { const TensorMap *own, *own2, *passing, *passing2; };

template <bool KEYS> struct Consumer {
  u32 x[16], y[16], p[16], ds[16];
  float s[32], dp[32], e[32], first[32], second[32];
  float factor[2], drop[2];  // of queries that are rows here
  float scale;

  // p of a tile, of which `left` columns are there.
  __device__ __forceinline__ void find_p(u32 factors, int left) {
    u32 column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float2 by_column = KEYS ? pair_from(factors + (i * 8 + column) * 4) : make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < 4; j++)
        e[4 * i + j] = exp2_of(fmaf(s[4 * i + j], scale, KEYS ? j % 2 ? by_column.y : by_column.x : factor[j / 2]));
    }
    if (!KEYS && left < TILE)
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + column + i % 2 >= left) e[i] = 0.f;
  }

  __device__ __forceinline__ void find_ds(u32 drops) {
    u32 column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float2 by_column = KEYS ? pair_from(drops + (i * 8 + column) * 4) : make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        int at = 4 * i + j;
        float2 d = KEYS ? by_column : make_float2(drop[j / 2], drop[j / 2]);
        if (KEYS) p[at / 2] = packed(e[at], e[at + 1]);
        ds[at / 2] = packed(e[at] * (dp[at] + d.x), e[at + 1] * (dp[at + 1] + d.y));
      }
    }
  }
};

template <bool KEYS>
__device__ __forceinline__ void produce(
    const Way& way, const float* factors, const Sizes& s, int batch, int head, int row, u32 own, u32 places, u32 barriers
) {
  u32 full = barriers + 8, empty = full + 8 * STAGES;
  int tiles = tiles_of(KEYS ? s.queries : s.keys);
  expect(barriers, OWN_BYTES);
#pragma unroll
  for (int i = 0; i < CONSUMERS; i++) {
    fetch(own + 2 * i * TILE_BYTES, *way.own, barriers, row + i * TILE, head, batch);
    fetch(own + (2 * i + 1) * TILE_BYTES, *way.own2, barriers, row + i * TILE, head, batch);
  }
  const float* of_head = factors + (batch * s.heads + head) * static_cast<long long>(tiles) * 2 * TILE;
  Place<STAGES> at;
  for (int i = 0; i < tiles; i++, at.next()) {
    u32 to = places + at.stage * STAGE_BYTES, barrier = full + 8 * at.stage;
    wait(empty + 8 * at.stage, at.phase ^ 1);
    expect(barrier, STAGE_BYTES + (KEYS ? 2 * FACTOR_BYTES : 0));
    fetch(to, *way.passing, barrier, i * TILE, head, batch);
    fetch(to + TILE_BYTES, *way.passing2, barrier, i * TILE, head, batch);
    if (KEYS)
      fetch_bytes(places + STAGES * STAGE_BYTES + at.stage * 2 * FACTOR_BYTES, of_head + i * 2 * TILE, 2 * FACTOR_BYTES, barrier);
  }
}

__device__ __forceinline__ void leave(const float (&sums)[32], float scale, const Rows& to, int batch, int head, int row, int rows) {
  row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  T* at = to.at + batch * to.batch + head * to.head + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; i++)
    if (int own = row + i % 2 * 8; own < rows)
      *reinterpret_cast<u32*>(at + own * to.row + i / 2 * 8) = packed(sums[2 * i] * scale, sums[2 * i + 1] * scale);
}

template <bool KEYS>
__device__ __forceinline__ void consume(
    const Rows& out, const Rows& out2, const float* factors, const Sizes& s, int batch, int head, int row, u32 own, u32 places, u32 barriers
) {
  u32 full = barriers + 8, empty = full + 8 * STAGES, group = threadIdx.x / 128 - 1, by_column = places + STAGES * STAGE_BYTES;
  int passing = KEYS ? s.queries : s.keys, rows = KEYS ? s.keys : s.queries, tiles = tiles_of(passing);
  bool teller = threadIdx.x % 32 == 0;
  row += group * TILE;
  Consumer<KEYS> c;
  c.scale = s.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    c.first[i] = c.second[i] = 0.f;
    asm volatile("" : "+f"(c.first[i]), "+f"(c.second[i])::"memory");
  }
  if (!KEYS) {
    int tile = row / TILE, line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float* of_tile = factors + ((batch * s.heads + head) * static_cast<long long>(tiles_of(s.queries)) + tile) * 2 * TILE;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      c.factor[i] = row < rows ? of_tile[line + 8 * i] : 0.f;
      c.drop[i] = row < rows ? of_tile[TILE + line + 8 * i] : 0.f;
    }
  }
  wait(barriers, 0);
  hold(c.x, own + 2 * group * TILE_BYTES);
  hold(c.y, own + (2 * group + 1) * TILE_BYTES);
  Place<STAGES> at;
  wait(full, 0);
  begin_products();
  scores(c.s, c.x, places);
  scores(c.dp, c.y, places + TILE_BYTES);
  end_products();
  products_done<0>();
  c.find_p(by_column, tiles > 1 ? TILE : passing);
  c.find_ds(by_column + FACTOR_BYTES);
  for (int i = 1; i < tiles; i++) {
    u32 before = at.stage, last = places + before * STAGE_BYTES;
    at.next();
    u32 here = places + at.stage * STAGE_BYTES, columns = by_column + at.stage * 2 * FACTOR_BYTES;
    wait(full + 8 * at.stage, at.phase);
    begin_products();
    scores(c.s, c.x, here);
    end_products();
    if (KEYS) add(c.second, c.p, last + TILE_BYTES);
    add(c.first, c.ds, last);
    scores(c.dp, c.y, here + TILE_BYTES);
    end_products();
    products_done<1>();
    c.find_p(columns, passing - i * TILE);
    products_done<0>();
    if (teller) arrive_at(empty + 8 * before);
    c.find_ds(columns + FACTOR_BYTES);
  }
  u32 last = places + at.stage * STAGE_BYTES;
  begin_products();
  if (KEYS) add(c.second, c.p, last + TILE_BYTES);
  add(c.first, c.ds, last);
  end_products();
  products_done<0>();
  leave(c.first, s.scale, out, batch, head, row, rows);
  if (KEYS) leave(c.second, 1.f, out2, batch, head, row, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_gradients(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
    const __grid_constant__ TensorMap g, const float* factors, const Rows dq, const Rows dk, const Rows dv, const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 1];
  u32 own = (shared_at(memory) + 1023) & ~1023u, places = own + OWN_BYTES, first = shared_at(barriers);
  int of_keys = (s.keys + ROWS - 1) / ROWS, of_queries = (s.queries + ROWS - 1) / ROWS, heads = s.batches * s.heads;
  bool keys = blockIdx.x < of_keys * heads;
  int i = keys ? blockIdx.x : blockIdx.x - of_keys * heads, blocks = keys ? of_keys : of_queries;
  int row = i % blocks * ROWS, head = i / blocks % s.heads, batch = i / blocks / s.heads;
  if (threadIdx.x == 0) {
    begin_barrier(first, 1);
    for (int j = 0; j < STAGES; j++) begin_barrier(first + 8 + 8 * j, 1), begin_barrier(first + 8 + 8 * (STAGES + j), 4 * CONSUMERS);
    show_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      if (keys) produce<true>({&key, &value, &query, &g}, factors, s, batch, head, row, own, places, first);
      else produce<false>({&query, &g, &key, &value}, factors, s, batch, head, row, own, places, first);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (keys) consume<true>(dk, dv, factors, s, batch, head, row, own, places, first);
    else consume<false>(dq, dq, factors, s, batch, head, row, own, places, first);
  }
}
