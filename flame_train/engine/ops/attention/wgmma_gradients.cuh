// Gradients of attention for heads of 64 by warpgroups (compute capability 9.0), in one order of sums, the same in every run.
//
// With s = scale q k^T, p = exp(s - lse) and ds = p (g v^T - drop), where drop = sum(g out) of each query. Then dq =
// scale ds k, dk = scale ds^T q, dv = p^T g (FlashAttention, appendix B.2). Two kinds of items find p and ds for
// themselves, seven products where five would do, so that nothing is added up in memory. Those of ROWS keys are passed
// by all queries and make dk and dv. Those of ROWS queries are passed by all keys and make dq.
//
// query and g are (B, H, L, 64), key and value (B, H, S, 64), by their maps in tiles of TILE rows. T is bf16 or fp16,
// sums are fp32, p and ds are rounded to T where products read them. `factors` are (B H, tiles of queries, 2, TILE)
// fp32, -lse in units of log 2 and -drop, which attention_factors fills. It has minus infinity and 0 where there is no
// query.
//
// CONSUMERS warpgroups have TILE rows of an item each. While p is found of one tile, the tensor cores make what the one
// before gives and the other operand of its ds. Items of keys, which are longer, come first. CAUSAL and MASKED are
// bools that are defined before. With CAUSAL query i sees the keys up to i, and tiles in which nothing is seen are
// passed over. With MASKED `bars`, (batches or 1, tiles of keys, TILE) fp32, has 0 for a key. It has minus infinity for
// one that no query of a sample sees. `bars_batch` is the distance between samples. Grid: at most one block a
// multiprocessor; THREADS a block.
#include "ops/attention/wgmma.cuh"

constexpr int CONSUMERS = 2, ROWS = TILE * CONSUMERS, THREADS = 128 * (CONSUMERS + 1), STAGES = 4;
constexpr u32 FACTOR_BYTES = TILE * 4, STAGE_BYTES = 2 * TILE_BYTES, OWN_BYTES = 2 * ROWS * HEAD * 2;

__device__ __forceinline__ int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }

// A left operand of 64 rows of 64, from shared memory to registers.
__device__ __forceinline__ void hold(u32 (&held)[16], u32 at) {
  u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < 4; k++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(held[4 * k]), "=r"(held[4 * k + 1]), "=r"(held[4 * k + 2]), "=r"(held[4 * k + 3])
                 : "r"(at + row * 128 + ((k * 2 + lane / 16 ^ row % 8) << 4)));
  __syncwarp();  // all lanes have theirs before one tells
}

// sums = a b^T.
__device__ __forceinline__ void scores(float (&sums)[32], const u32 (&a)[16], u32 b) {
  along_overwrite(sums, a, operand(b));
#pragma unroll
  for (int k = 1; k < 4; k++) along(sums, a + 4 * k, operand(b + k * 32));
}

// ROWS keys or queries of a head that a block owns.
struct Item { bool keys; int batch, head, row; };

struct Items {
  int of_keys, of_queries, heads, count;
  __device__ Items(const Sizes& s)
      : of_keys((s.keys + ROWS - 1) / ROWS), of_queries((s.queries + ROWS - 1) / ROWS), heads(s.heads),
        count((of_keys + of_queries) * s.heads * s.batches) {}
  __device__ Item at(int i, int batches) const {
    bool keys = i < of_keys * heads * batches;
    int rest = keys ? i : i - of_keys * heads * batches, blocks = keys ? of_keys : of_queries;
    int block = CAUSAL && !keys ? blocks - 1 - rest % blocks : rest % blocks;  // later queries see more
    return {keys, rest / blocks / heads, rest / blocks % heads, block * ROWS};
  }
};

// The tiles that pass an item: all of the other side, or those of which something is seen, but one at least.
struct Passing {
  int first, end;
  __device__ Passing(const Item& item, const Sizes& s) : first(0), end(tiles_of(item.keys ? s.queries : s.keys)) {
    if (CAUSAL && item.keys) first = min(item.row / TILE, end - 1);
    if (CAUSAL && !item.keys) end = min(item.row / TILE + CONSUMERS, end);
  }
};

__device__ __forceinline__ const float* factors_of(const float* factors, const Item& item, const Sizes& s) {
  return factors + (item.batch * s.heads + item.head) * (tiles_of(s.queries) * 2ll * TILE);
}

template <bool KEYS> struct Consumer {
  u32 x[16], y[16], p[16], ds[16];
  float s[32], dp[32], e[32], first[32], second[32];
  float factor[2], drop[2];  // of queries that are rows here
  float scale;

  // p of a tile, of which `left` columns are there; its first column is `before` places before this warpgroup's first row.
  __device__ __forceinline__ void find_p(u32 factors, int left, int before) {
    u32 column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float2 by_column = KEYS || MASKED ? pair_from(factors + (i * 8 + column) * 4) : make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float of_column = j % 2 ? by_column.y : by_column.x;
        float added = KEYS ? of_column : MASKED ? factor[j / 2] + of_column : factor[j / 2];
        e[4 * i + j] = exp2_of(fmaf(s[4 * i + j], scale, added));
      }
    }
    if (!KEYS && left < TILE)
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + column + i % 2 >= left) e[i] = 0.f;
    if (CAUSAL && (KEYS ? before > -TILE : before < TILE)) {
      int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int i = 0; i < 32; i++) {
        int ahead = static_cast<int>(i / 4 * 8 + column + i % 2) - (row + i % 4 / 2 * 8) - before;
        if (KEYS ? ahead < 0 : ahead > 0) e[i] = 0.f;
      }
    }
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

// Fetches what an item owns, `x` and `y`, and all that passes it, `u` and `w`, with their numbers: queries' factors, or bars.
__device__ __forceinline__ void produce(
    const TensorMap& x, const TensorMap& y, const TensorMap& u, const TensorMap& w, const float* numbers,
    const Passing& passing, const Item& item, const Memory& room, Place<STAGES>& at, u32 phase
) {
  wait(room.left, phase ^ 1);
  expect(room.came, OWN_BYTES);
#pragma unroll
  for (int i = 0; i < CONSUMERS; i++) {
    fetch(room.own + 2 * i * TILE_BYTES, x, room.came, item.row + i * TILE, item.head, item.batch);
    fetch(room.own + (2 * i + 1) * TILE_BYTES, y, room.came, item.row + i * TILE, item.head, item.batch);
  }
  u32 number_bytes = item.keys ? 2 * FACTOR_BYTES : MASKED ? FACTOR_BYTES : 0;
  for (int i = passing.first; i < passing.end; i++, at.next()) {
    u32 to = room.places + at.stage * STAGE_BYTES, barrier = room.full + 8 * at.stage;
    wait(room.empty + 8 * at.stage, at.phase ^ 1);
    expect(barrier, STAGE_BYTES + number_bytes);
    fetch(to, u, barrier, i * TILE, item.head, item.batch);
    fetch(to + TILE_BYTES, w, barrier, i * TILE, item.head, item.batch);
    if (number_bytes)
      fetch_bytes(room.rest + at.stage * 2 * FACTOR_BYTES, numbers + i * (number_bytes / 4), number_bytes, barrier);
  }
}

// `numbers` are those of what an item owns: queries' factors, or keys' bars.
template <bool KEYS>
__device__ __forceinline__ void consume(
    const Rows& out, const Rows& out2, const float* numbers, const Sizes& s, const Passing& tiles, const Item& item,
    const Memory& room, Place<STAGES>& at, u32 phase
) {
  u32 group = threadIdx.x / 128 - 1;
  int passing = KEYS ? s.queries : s.keys, rows = KEYS ? s.keys : s.queries;
  int row = item.row + group * TILE;
  bool teller = threadIdx.x % 32 == 0;
  Consumer<KEYS> c;
  c.scale = s.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    c.first[i] = c.second[i] = 0.f;
    asm volatile("" : "+f"(c.first[i]), "+f"(c.second[i])::"memory");
  }
  if (!KEYS && row < rows) {
    const float* own = numbers + row / TILE * 2 * TILE + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) c.factor[i] = own[8 * i], c.drop[i] = own[TILE + 8 * i];
  }
  wait(room.came, phase);
  hold(c.x, room.own + 2 * group * TILE_BYTES);
  hold(c.y, room.own + (2 * group + 1) * TILE_BYTES);
  if (teller) arrive_at(room.left);
  u32 here = room.places + at.stage * STAGE_BYTES, columns = room.rest + at.stage * 2 * FACTOR_BYTES;
  wait(room.full + 8 * at.stage, at.phase);
  begin_products();
  scores(c.s, c.x, here);
  scores(c.dp, c.y, here + TILE_BYTES);
  end_products();
  products_done<0>();
  c.find_p(columns, passing - tiles.first * TILE, row - tiles.first * TILE);
  c.find_ds(columns + FACTOR_BYTES);
  for (int i = tiles.first + 1; i < tiles.end; i++) {
    u32 before = at.stage, last = here;
    at.next();
    here = room.places + at.stage * STAGE_BYTES, columns = room.rest + at.stage * 2 * FACTOR_BYTES;
    wait(room.full + 8 * at.stage, at.phase);
    await_turn(group);
    begin_products();
    scores(c.s, c.x, here);
    end_products();
    if (KEYS) add(c.second, c.p, last + TILE_BYTES);
    add(c.first, c.ds, last);
    scores(c.dp, c.y, here + TILE_BYTES);
    end_products();
    next_turn(group, CONSUMERS);
    products_done<1>();
    c.find_p(columns, passing - i * TILE, row - i * TILE);
    products_done<0>();
    if (teller) arrive_at(room.empty + 8 * before);
    c.find_ds(columns + FACTOR_BYTES);
  }
  begin_products();
  if (KEYS) add(c.second, c.p, here + TILE_BYTES);
  add(c.first, c.ds, here);
  end_products();
  products_done<0>();
  if (teller) arrive_at(room.empty + 8 * at.stage);
  at.next();
  if (KEYS && MASKED)  // whose probabilities were never barred: a key's are its own row's alone
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (int own = row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * j; own < rows && numbers[own] < 0.f)
#pragma unroll
        for (int i = 0; i < 32; i++)
          if (i / 2 % 2 == j) c.first[i] = c.second[i] = 0.f;
  leave(c.first, s.scale, s.scale, out.head_of(item.batch, item.head), out.row, row, rows);
  if (KEYS) leave(c.second, 1.f, 1.f, out2.head_of(item.batch, item.head), out2.row, row, rows);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_gradients(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
    const __grid_constant__ TensorMap g, const float* factors, const float* bars, long long bars_batch, const Rows dq,
    const Rows dk, const Rows dv, const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 2];
  Memory room(memory, barriers, 1, OWN_BYTES, STAGES, STAGE_BYTES);
  Items items(s);
  Place<STAGES> at;
  if (threadIdx.x == 0) room.begin(1, STAGES, 4 * CONSUMERS);
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      for (int n = 0, i; (i = nth(n)) < items.count; n++) {
        Item item = items.at(i, s.batches);
        Passing tiles(item, s);
        if (item.keys) produce(key, value, query, g, factors_of(factors, item, s), tiles, item, room, at, n % 2);
        else produce(query, g, key, value, bars + item.batch * bars_batch, tiles, item, room, at, n % 2);
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (threadIdx.x >= THREADS - 128) next_turn(CONSUMERS - 1, CONSUMERS);
    for (int n = 0, i; (i = nth(n)) < items.count; n++) {
      Item item = items.at(i, s.batches);
      Passing tiles(item, s);
      if (item.keys) consume<true>(dk, dv, bars + item.batch * bars_batch, s, tiles, item, room, at, n % 2);
      else consume<false>(dq, dq, factors_of(factors, item, s), s, tiles, item, room, at, n % 2);
    }
  }
}
