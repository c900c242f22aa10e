// Gradients of attention to at most KEYS keys, heads of 64, by warpgroups (compute capability 9.0), in one order of sums.
//
// With s = scale q k^T, p = exp(s - lse), dp = g v^T and ds = p (dp - sum(p dp)) of each query: dq = scale ds k, dk = scale
// ds^T q, dv = p^T g (FlashAttention, appendix B.2; sum(p dp) is sum(g out), so `out` is not read). Keys being fewer than
// twice a warpgroup's rows, dk and dv are made as their transposes, q^T ds and g^T p.
//
// query, g and dq are (B, H, L, 64), by their maps in tiles of TILE rows, key and value (B, H, S, 64), 1 <= S <= KEYS, by
// theirs of KEYS rows; dk and dv likewise, in packets. T is bf16 or fp16, sums are fp32, p and ds are rounded to T where
// products read them. lse (B, H, L) fp32. A cluster of SHARE blocks has a head and adds up its keys' sums in a fixed order:
// equal inputs give equal bits. Grid: (B H, SHARE), SHARE at most the tiles; THREADS a block.
#include "few_keys.cuh"

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

struct Consumer {
  float found[SUMS], dp[SUMS], sums_k[SUMS], sums_v[SUMS];
  u32 p[SUMS / 2], ds[SUMS / 2];
  float scale, lse[2], next_lse[2];

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
};

extern "C" __cluster_dims__(1, SHARE, 1) __global__ void __launch_bounds__(THREADS, 2) few_keys_gradients(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
    const __grid_constant__ TensorMap g, const __grid_constant__ TensorMap dq, const float* lse, const Rows dk, const Rows dv,
    const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[STAGES + 1];
  u32 keys = (shared_at(memory) + 1023) & ~1023u, values = keys + KEY_BYTES, places = values + KEY_BYTES;
  u32 weights = places + STAGES * STAGE_BYTES, weights2 = weights + WEIGHTS_BYTES, leaving = weights2 + WEIGHTS_BYTES;
  u32 full = shared_at(barriers), came = full + 8 * STAGES;
  int batch = blockIdx.x / s.heads, head = blockIdx.x % s.heads, own = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  int first = blockIdx.y * TILE, step = SHARE * TILE, tiles = (s.queries - first + step - 1) / step;
  bool teller = threadIdx.x == 0;
  if (teller) {
    for (int i = 0; i <= STAGES; i++) begin_barrier(full + 8 * i, 1);
    show_barriers();
  }
  __syncthreads();
  auto ask = [&](int i) {
    if (i >= tiles) return;
    u32 to = places + i % STAGES * STAGE_BYTES, barrier = full + 8 * (i % STAGES);
    expect(barrier, STAGE_BYTES);
    fetch(to, query, barrier, first + i * step, head, batch);
    fetch(to + TILE_BYTES, g, barrier, first + i * step, head, batch);
  };
  if (teller) {
    ask(0);
    fetch_keys(keys, values, key, value, came, head, batch);
    for (int i = 1; i < STAGES; i++) ask(i);
  }
  const float* of_head = lse + blockIdx.x * static_cast<long long>(s.queries);
  auto read = [&](float (&logs)[2], int i) {
    int row = first + i * step + own;
#pragma unroll
    for (int j = 0; j < 2; j++) logs[j] = row + 8 * j < s.queries ? of_head[row + 8 * j] * LOG2E : 0.f;
  };
  Consumer c;
  c.scale = s.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    c.sums_k[i] = c.sums_v[i] = 0.f;
    asm volatile("" : "+f"(c.sums_k[i]), "+f"(c.sums_v[i])::"memory");
  }
  read(c.next_lse, 0);
  // When all warps are done with a tile, what it gave is sent and its place is filled again.
  auto let_go = [&](int i) {
    __syncthreads();
    if (!teller || i < 0) return;
    send(dq, leaving + i % 2 * TILE_BYTES, first + i * step, head, batch);
    ask(i + STAGES);
  };
  Place<STAGES> at;
  // Weighs with tile i, whose scores are there. The next tile's are asked for before the products that nothing waits for.
  auto weigh = [&](int i, bool more) {
    u32 here = places + at.stage * STAGE_BYTES;
    float sums[32];
    c.lse[0] = c.next_lse[0], c.lse[1] = c.next_lse[1];
    if (more) read(c.next_lse, i + 1);
    c.find(s.keys);
    products_done<0>();
    let_go(i - 1);
    put_weights(weights, c.p);
    put_weights(weights2, c.ds);
    show_to_sender();
    if (teller) sent<1>();  // the place that dq leaves by now
    __syncthreads();
    at.next();
    if (more) wait(full + 8 * at.stage, at.phase);
    begin_products();
    across_fresh(sums, c.ds, operand(keys));
#pragma unroll
    for (int k = 1; k < KEYS / 16; k++) across(sums, c.ds + 4 * k, operand(keys + k * 16 * 128));
    end_products();
    if (more) c.ask_for_scores(places + at.stage * STAGE_BYTES, keys, values);
    add_keys(c.sums_v, here + TILE_BYTES, weights);
    add_keys(c.sums_k, here, weights2);
    end_products();
    if (more) products_done<2>();
    else products_done<1>();
    put(leaving + i % 2 * TILE_BYTES, sums, s.scale, s.scale);
    show_to_sender();
  };
  wait(came, 0);
  wait(full, 0);
  begin_products();
  c.ask_for_scores(places, keys, values);
  products_done<0>();
  for (int i = 0; i + 1 < tiles; i++) {
    weigh(i, true);
    products_done<1>();
  }
  weigh(tiles - 1, false);
  products_done<0>();
  let_go(tiles - 1);
  if (teller) sent<0>();
  __syncthreads();
  float* shared = reinterpret_cast<float*>(memory + (keys - shared_at(memory)));
  share_sums(shared, c.sums_k);
  share_sums(shared + KEYS * PITCH, c.sums_v);
  cluster_sync();
  total(shared, dk.head_of(batch, head), dk.row, dv.head_of(batch, head), dv.row, s.keys, s.scale);
  cluster_sync();
}
