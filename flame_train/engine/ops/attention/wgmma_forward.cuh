// Attention for heads of 64 by warpgroups (compute capability 9.0): out = softmax(scale q k^T) v and each row's log-sum-exp.
//
// query and out are (B, H, L, 64), key and value (B, H, S, 64), by their maps in tiles of TILE rows. T is bf16 or fp16,
// sums are fp32, probabilities are rounded to T where products read them. lse (B, H, L) fp32. scale is positive. One
// order of sums.
//
// An item is ROWS queries of a head, TILE for each of CONSUMERS warpgroups; WIDE tiles of keys pass at a time. While the
// exponentials of one are found the tensor cores make what the one before gives (FlashAttention-3, arXiv 2407.08608, 3.2). A
// row's sums are rescaled for a larger score only where exponentials would otherwise grow beyond 2^GROWTH. That is rare after
// the first tile (as FlashAttention-4 does). Grid: at most one block a multiprocessor; THREADS a block.
#include "ops/attention/wgmma.cuh"

constexpr int CONSUMERS = 3, WIDE = 2, OWNS = 2, STAGES = 4;
constexpr int KEYS = TILE * WIDE, ROWS = TILE * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);
constexpr u32 OWN_BYTES = CONSUMERS * TILE_BYTES, STAGE_BYTES = 2 * WIDE * TILE_BYTES;
constexpr float GROWTH = 8.f, LN2 = 0.6931471805599453f;

// sums = a b^T.
__device__ __forceinline__ void scores(float (&sums)[32 * WIDE], u32 a, u32 b) {
  along_overwrite(sums, operand(a), operand(b));
#pragma unroll
  for (int k = 1; k < 4; k++) along(sums, operand(a + k * 32), operand(b + k * 32));
}

struct Item { int batch, head, row; };

__device__ __forceinline__ Item item_at(int i, int blocks, int heads) {
  return {i / blocks / heads, i / blocks % heads, i % blocks * ROWS};
}

__device__ __forceinline__ void produce(
    const TensorMap& query, const TensorMap& key, const TensorMap& value, int tiles, const Item& item, const Memory& room,
    Place<OWNS>& own, Place<STAGES>& at
) {
  u32 came = room.came + 8 * own.stage;
  wait(room.left + 8 * own.stage, own.phase ^ 1);
  expect(came, OWN_BYTES);
#pragma unroll
  for (int i = 0; i < CONSUMERS; i++)
    fetch(room.own + own.stage * OWN_BYTES + i * TILE_BYTES, query, came, item.row + i * TILE, item.head, item.batch);
  own.next();
  for (int i = 0; i < tiles; i++, at.next()) {
    u32 to = room.places + at.stage * STAGE_BYTES, barrier = room.full + 8 * at.stage;
    wait(room.empty + 8 * at.stage, at.phase ^ 1);
    expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
      fetch(to + j * TILE_BYTES, key, barrier, i * KEYS + j * TILE, item.head, item.batch);
      fetch(to + (WIDE + j) * TILE_BYTES, value, barrier, i * KEYS + j * TILE, item.head, item.batch);
    }
  }
}

struct Consumer {
  u32 q, p[16 * WIDE];
  float s[32 * WIDE], e[32 * WIDE], sums[32];
  float top[2], total[2], shrunk[2];  // of a thread's two rows; scores are in units of log 2
  float scale;

  // Exponentials of a tile, of which `left` columns are there; whether what was summed is to be shrunk first.
  __device__ __forceinline__ bool find(int left) {
    if (left < KEYS)
#pragma unroll
      for (int i = 0; i < 32 * WIDE; i++)
        if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= left) s[i] = __int_as_float(0xff800000);
    bool grown = false;
    float peak[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
      peak[row] = s[2 * row];
#pragma unroll
      for (int i = 0; i < 32 * WIDE; i++)
        if (i / 2 % 2 == row) peak[row] = fmaxf(peak[row], s[i]);
      peak[row] = of_row(peak[row], false) * scale;
      grown |= peak[row] > top[row] + GROWTH;
    }
    grown = __any_sync(0xffffffffu, grown);
    if (grown)
#pragma unroll
      for (int row = 0; row < 2; row++) {
        float higher = fmaxf(top[row], peak[row]);
        shrunk[row] = exp2_of(top[row] - higher);
        total[row] *= shrunk[row];
        top[row] = higher;
      }
#pragma unroll
    for (int i = 0; i < 32 * WIDE; i++) {
      e[i] = exp2_of(fmaf(s[i], scale, -top[i / 2 % 2]));
      total[i / 2 % 2] += e[i];
    }
    return grown;
  }

  __device__ __forceinline__ void shrink() {
#pragma unroll
    for (int i = 0; i < 32; i++) sums[i] *= shrunk[i / 2 % 2];
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < 16 * WIDE; i++) p[i] = packed(e[2 * i], e[2 * i + 1]);
  }
};

__device__ __forceinline__ void consume(
    const Rows& out, float* lse, const Sizes& s, const Item& item, const Memory& room, Place<OWNS>& own,
    Place<STAGES>& at
) {
  u32 group = threadIdx.x / 128 - 1;
  int tiles = (s.keys + KEYS - 1) / KEYS, row = item.row + group * TILE;
  bool teller = threadIdx.x % 32 == 0;
  Consumer c;
  c.scale = s.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    c.sums[i] = 0.f;
    asm volatile("" : "+f"(c.sums[i])::"memory");
  }
#pragma unroll
  for (int i = 0; i < 2; i++) c.top[i] = __int_as_float(0xff800000), c.total[i] = 0.f;
  c.q = room.own + own.stage * OWN_BYTES + group * TILE_BYTES;
  wait(room.came + 8 * own.stage, own.phase);
  u32 here = room.places + at.stage * STAGE_BYTES;
  wait(room.full + 8 * at.stage, at.phase);
  begin_products();
  scores(c.s, c.q, here);
  end_products();
  products_done<0>();
  c.find(s.keys);
  c.pack();
  for (int i = 1; i < tiles; i++) {
    u32 before = at.stage, last = here;
    at.next();
    here = room.places + at.stage * STAGE_BYTES;
    wait(room.full + 8 * at.stage, at.phase);
    await_turn(group);
    begin_products();
    scores(c.s, c.q, here);
    end_products();
    add(c.sums, c.p, last + WIDE * TILE_BYTES);
    end_products();
    next_turn(group, CONSUMERS);
    products_done<1>();
    bool grown = c.find(s.keys - i * KEYS);
    products_done<0>();
    if (teller) arrive_at(room.empty + 8 * before);
    if (grown) c.shrink();
    c.pack();
  }
  begin_products();
  add(c.sums, c.p, here + WIDE * TILE_BYTES);
  end_products();
  products_done<0>();
  if (teller) arrive_at(room.empty + 8 * at.stage), arrive_at(room.left + 8 * own.stage);
  at.next(), own.next();
  float total[2] = {of_row(c.total[0], true), of_row(c.total[1], true)};
  leave(c.sums, 1.f / total[0], 1.f / total[1], out.head_of(item.batch, item.head), out.row, row, s.queries);
  float* of_head = lse + (item.batch * s.heads + item.head) * static_cast<long long>(s.queries);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (int own = row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; threadIdx.x % 4 == 0 && own < s.queries)
      of_head[own] = c.top[i] * LN2 + logf(total[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
    const Rows out, float* lse, const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * (OWNS + STAGES)];
  Memory room(memory, barriers, OWNS, OWN_BYTES, STAGES, STAGE_BYTES);
  int blocks = (s.queries + ROWS - 1) / ROWS, count = blocks * s.heads * s.batches;
  Place<OWNS> own;
  Place<STAGES> at;
  if (threadIdx.x == 0) room.begin(OWNS, STAGES, 4 * CONSUMERS);
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 0)
      for (int n = 0, i; (i = nth(n)) < count; n++)
        produce(query, key, value, (s.keys + KEYS - 1) / KEYS, item_at(i, blocks, s.heads), room, own, at);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    if (threadIdx.x >= THREADS - 128) next_turn(CONSUMERS - 1, CONSUMERS);
    for (int n = 0, i; (i = nth(n)) < count; n++) consume(out, lse, s, item_at(i, blocks, s.heads), room, own, at);
  }
}
