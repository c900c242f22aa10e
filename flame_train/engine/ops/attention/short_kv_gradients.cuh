// Gradients of attention to at most KEYS keys, heads of 64, by warpgroups (compute capability 9.0), in one order of sums.
//
// With s = scale q k^T, p = exp(s - lse), dp = g v^T and ds = p (dp - sum(p dp)) of each query. Then dq = scale ds k,
// dk = scale ds^T q, dv = p^T g (FlashAttention, appendix B.2; sum(p dp) is sum(g out), so `out` is not read). Keys
// being fewer than twice a warpgroup's rows, dk and dv are made as their transposes, q^T ds and g^T p.
//
// query, g and dq are (B, H, L, 64), by their maps in tiles of TILE rows. Inputs key and value (B, H, S, 64), 1 <= S <=
// KEYS, by theirs of KEYS rows. Outputs dk and dv likewise, in packets. T is bf16 or fp16, sums are fp32, p and ds are
// rounded to T where products read them. lse (B, H, L) fp32. A cluster of SHARE blocks has a head and adds up its keys'
// sums in a fixed order: equal inputs give equal bits. Grid: (B H, SHARE), SHARE at most the tiles; THREADS a block.
#include "ops/attention/short_kv.cuh"

constexpr u32 STAGE_BYTES = 2 * TILE_BYTES, STRIP_BYTES = TILE * 32, WEIGHTS_BYTES = TILE * KEYS * 2;
constexpr int PITCH = HEAD + 4;  // of a key's sums: lanes that write together meet different banks
constexpr u32 SUMS_BYTES = KEYS * PITCH * 4;

// A tile of weights, of which a thread has `made`, to shared memory: strips of 16 keys, rows of 32 bytes, swizzled by 32.
__device__ __forceinline__ void put_weights(u32 to, const u32 (&made)[SUMS / 2]) {
  u32 lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int strip = 0; strip < KEYS / 16; strip++) {
    const u32 four[4] = {made[4 * strip], made[4 * strip + 1], made[4 * strip + 2], made[4 * strip + 3]};
    put4(to + strip * STRIP_BYTES + line * 32 + ((lane / 16 ^ line / 4 % 2) << 4), four);
  }
}

// sums (HEAD x KEYS) += the transpose of a tile of rows times a tile of weights.
__device__ __forceinline__ void add_keys(float (&sums)[SUMS], u32 rows, u32 weights) {
#pragma unroll
  for (int k = 0; k < TILE / 16; k++)
    turned(sums, operand(rows + k * 16 * 128), strip_operand(weights + k * 16 * 32, STRIP_BYTES));
}

__device__ __forceinline__ void share_sums(float* to, const float (&sums)[SUMS]) {
  to += threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < SUMS; i++) to[column_of(i) * PITCH + i / 2 % 2 * 8] = sums[i];
}

// The cluster's sums, of which this block adds up and writes its part.
__device__ __forceinline__ void total(
    const float* sums, T* dk, long long dk_row, T* dv, long long dv_row, int keys, float scale
) {
  for (int e = blockIdx.y * THREADS + threadIdx.x; e < keys * HEAD / 4; e += SHARE * THREADS) {
    int row = e / (HEAD / 4), column = e % (HEAD / 4) * 4;
    u32 own = shared_at(sums + row * PITCH + column);
    float4 of_k[SHARE], of_v[SHARE], k = make_float4(0.f, 0.f, 0.f, 0.f), v = k;
#pragma unroll
    for (int block = 0; block < SHARE; block++)
      of_k[block] = four_of(own, block), of_v[block] = four_of(own + SUMS_BYTES, block);
#pragma unroll
    for (int block = 0; block < SHARE; block++) k = sum_of(k, of_k[block]), v = sum_of(v, of_v[block]);
    *reinterpret_cast<uint2*>(dk + row * dk_row + column) =
        make_uint2(packed(k.x * scale, k.y * scale), packed(k.z * scale, k.w * scale));
    *reinterpret_cast<uint2*>(dv + row * dv_row + column) = make_uint2(packed(v.x, v.y), packed(v.z, v.w));
  }
}

// Where a block has what in shared memory, and its barriers.
struct Room {
  u32 keys, values, places, weights, weights2, leaving, full, came;
  __device__ Room(const void* memory, const u64* barriers)
      : keys((shared_at(memory) + 1023) & ~1023u), values(keys + KEY_BYTES), places(values + KEY_BYTES),
        weights(places + STAGES * STAGE_BYTES), weights2(weights + WEIGHTS_BYTES), leaving(weights2 + WEIGHTS_BYTES),
        full(shared_at(barriers)), came(full + 8 * STAGES) {}
};

// The tiles of a head's queries that are this block's.
struct Tiles {
  int batch, head, first, count, queries;
  __device__ explicit Tiles(const Sizes& s)
      : batch(blockIdx.x / s.heads), head(blockIdx.x % s.heads), first(blockIdx.y * TILE),
        count((s.queries - first + SHARE * TILE - 1) / (SHARE * TILE)), queries(s.queries) {}
  __device__ int row(int i) const { return first + i * SHARE * TILE; }
  // Asks for tile i of queries and of g, if there is one.
  __device__ void ask(int i, const Room& room, const TensorMap& query, const TensorMap& g) const {
    if (i >= count) return;
    u32 to = room.places + i % STAGES * STAGE_BYTES, barrier = room.full + 8 * (i % STAGES);
    expect(barrier, STAGE_BYTES);
    fetch(to, query, barrier, row(i), head, batch);
    fetch(to + TILE_BYTES, g, barrier, row(i), head, batch);
  }
};

// lse of a thread's two rows of a tile, in units of log 2.
__device__ __forceinline__ void read(float (&logs)[2], const float* lse, const Tiles& tiles, int i) {
  int row = tiles.row(i) + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float* of_head = lse + blockIdx.x * static_cast<long long>(tiles.queries);
#pragma unroll
  for (int j = 0; j < 2; j++) logs[j] = row + 8 * j < tiles.queries ? of_head[row + 8 * j] * LOG2E : 0.f;
}

struct Consumer {
  float found[SUMS], dp[SUMS], sums_k[SUMS], sums_v[SUMS];
  u32 p[SUMS / 2], ds[SUMS / 2];
  float scale, lse[2], next_lse[2];

  __device__ __forceinline__ explicit Consumer(float scale) : scale(scale * LOG2E) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      sums_k[i] = sums_v[i] = 0.f;
      asm volatile("" : "+f"(sums_k[i]), "+f"(sums_v[i])::"memory");
    }
  }

  // Asks for the scores of a tile, and for what comes back to its probabilities.
  __device__ __forceinline__ void ask_for_scores(u32 here, u32 keys, u32 values) {
    scores(found, here, keys);
    scores(dp, here + TILE_BYTES, values);
    end_products();
  }

  // p and ds of a tile, as products read them, of which `keys` columns are there.
  __device__ __forceinline__ void find(int keys) {
    float drop[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      found[i] = column_of(i) < keys ? exp2_of(fmaf(found[i], scale, -lse[i / 2 % 2])) : 0.f;
      drop[i / 2 % 2] += found[i] * dp[i];
    }
#pragma unroll
    for (int row = 0; row < 2; row++) drop[row] = of_row(drop[row], true);
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
      p[i] = packed(found[2 * i], found[2 * i + 1]);
      ds[i] = packed(found[2 * i] * (dp[2 * i] - drop[i % 2]), found[2 * i + 1] * (dp[2 * i + 1] - drop[i % 2]));
    }
  }

  // dq of a tile of which ds is known, and its part of dk and dv. With MORE, the scores of the next tile are requested before
  // the products that nothing waits for, and are there at the end.
  template <bool MORE>
  __device__ __forceinline__ void multiply(float (&dq)[32], const Room& room, u32 here, u32 next) {
    begin_products();
    across_overwrite(dq, ds, operand(room.keys));
#pragma unroll
    for (int k = 1; k < KEYS / 16; k++) across(dq, ds + 4 * k, operand(room.keys + k * 16 * 128));
    end_products();
    if (MORE) ask_for_scores(next, room.keys, room.values);
    add_keys(sums_v, here + TILE_BYTES, room.weights);
    add_keys(sums_k, here, room.weights2);
    end_products();
    products_done<MORE ? 2 : 1>();
  }
};

// A block's way through its tiles.
struct Block {
  const TensorMap &query, &g, &dq;
  const float* lse;
  Room room;
  Tiles tiles;
  Consumer c;
  Place<STAGES> at;
  bool teller;

  // When all warps are done with tile i, what it gave is sent and its place is filled again.
  __device__ __forceinline__ void let_go(int i) const {
    __syncthreads();
    if (!teller || i < 0) return;
    send(dq, room.leaving + i % 2 * TILE_BYTES, tiles.row(i), tiles.head, tiles.batch);
    tiles.ask(i + STAGES, room, query, g);
  }

  // Weighs with tile i, whose scores are there. With MORE, those of the next are on their way at the end.
  template <bool MORE> __device__ __forceinline__ void weigh(int i, const Sizes& s) {
    u32 here = room.places + at.stage * STAGE_BYTES;
    float sums[32];
    c.lse[0] = c.next_lse[0], c.lse[1] = c.next_lse[1];
    if (MORE) read(c.next_lse, lse, tiles, i + 1);
    c.find(s.keys);
    products_done<0>();
    let_go(i - 1);
    put_weights(room.weights, c.p);
    put_weights(room.weights2, c.ds);
    show_to_sender();
    if (teller) sent<1>();  // the place that dq leaves by now
    __syncthreads();
    at.next();
    if (MORE) wait(room.full + 8 * at.stage, at.phase);
    c.multiply<MORE>(sums, room, here, room.places + at.stage * STAGE_BYTES);
    put(room.leaving + i % 2 * TILE_BYTES, sums, s.scale, s.scale);
    show_to_sender();
    products_done<MORE ? 1 : 0>();
  }
};

extern "C" __cluster_dims__(1, SHARE, 1) __global__ void __launch_bounds__(THREADS, 2) short_kv_gradients(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
    const __grid_constant__ TensorMap g, const __grid_constant__ TensorMap dq, const float* lse, const Rows dk, const Rows dv,
    const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[STAGES + 1];
  Room room(memory, barriers);
  Tiles tiles(s);
  bool teller = threadIdx.x == 0;
  if (teller) {
    for (int i = 0; i <= STAGES; i++) begin_barrier(room.full + 8 * i, 1);
    show_barriers();
  }
  __syncthreads();
  if (teller) {
    tiles.ask(0, room, query, g);
    fetch_keys(room.keys, room.values, key, value, room.came, tiles.head, tiles.batch);
    for (int i = 1; i < STAGES; i++) tiles.ask(i, room, query, g);
  }
  Block b = {query, g, dq, lse, room, tiles, Consumer(s.scale), {}, teller};
  read(b.c.next_lse, lse, tiles, 0);
  wait(room.came, 0);
  wait(room.full, 0);
  begin_products();
  b.c.ask_for_scores(room.places, room.keys, room.values);
  products_done<0>();
  for (int i = 0; i + 1 < tiles.count; i++) b.weigh<true>(i, s);
  b.weigh<false>(tiles.count - 1, s);
  b.let_go(tiles.count - 1);  // all have read keys and places, where the sums go
  if (teller) sent<0>();
  float* shared = reinterpret_cast<float*>(memory + (room.keys - shared_at(memory)));
  share_sums(shared, b.c.sums_k);
  share_sums(shared + KEYS * PITCH, b.c.sums_v);
  cluster_sync();
  total(shared, dk.head_of(tiles.batch, tiles.head), dk.row, dv.head_of(tiles.batch, tiles.head), dv.row, s.keys, s.scale);
  cluster_sync();
}
