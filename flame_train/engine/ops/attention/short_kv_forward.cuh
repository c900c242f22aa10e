// Attention to at most KEYS keys, heads of 64, by warpgroups (compute capability 9.0): out = softmax(scale q k^T) v and each
// row's log-sum-exp.
//
// query and out are (B, H, L, 64), by their maps in tiles of TILE rows. Inputs key and value (B, H, S, 64), 1 <= S <=
// KEYS, by theirs of KEYS rows. T is bf16 or fp16, sums are fp32, probabilities are rounded to T where products read
// them. lse (B, H, L) fp32. All scores of a row are there at once, so nothing is taken back when a larger one comes. A
// tile leaves by the place it came to. Grid: (B H, any); THREADS a block.
#include "ops/attention/short_kv.cuh"

constexpr float LN2 = 0.6931471805599453f;

// Scores of which `keys` are there to exponentials, as a product's left operand; each row's sum and log-sum-exp.
__device__ __forceinline__ void softmax(
    float (&s)[SUMS], int keys, float scale, u32 (&p)[SUMS / 2], float (&total)[2], float (&lse)[2]
) {
  float top[2] = {__int_as_float(0xff800000), __int_as_float(0xff800000)};
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    s[i] = column_of(i) < keys ? s[i] * scale : __int_as_float(0xff800000);
    top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
  }
#pragma unroll
  for (int row = 0; row < 2; row++) top[row] = of_row(top[row], false), total[row] = 0.f;
#pragma unroll
  for (int i = 0; i < SUMS; i++) {
    s[i] = exp2_of(s[i] - top[i / 2 % 2]);
    total[i / 2 % 2] += s[i];
  }
#pragma unroll
  for (int i = 0; i < SUMS / 2; i++) p[i] = packed(s[2 * i], s[2 * i + 1]);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    total[row] = of_row(total[row], true);
    lse[row] = top[row] * LN2 + logf(total[row]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) short_kv_forward(
    const __grid_constant__ TensorMap query, const __grid_constant__ TensorMap key, const __grid_constant__ TensorMap value,
    const __grid_constant__ TensorMap out, float* lse, const Sizes s
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[STAGES + 1];
  u32 keys = (shared_at(memory) + 1023) & ~1023u, values = keys + KEY_BYTES, places = values + KEY_BYTES;
  u32 full = shared_at(barriers), came = full + 8 * STAGES;
  int batch = blockIdx.x / s.heads, head = blockIdx.x % s.heads, step = gridDim.y * TILE;
  int own = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  bool teller = threadIdx.x == 0;
  if (teller) {
    for (int i = 0; i <= STAGES; i++) begin_barrier(full + 8 * i, 1);
    show_barriers();
  }
  __syncthreads();
  auto ask = [&](int row, u32 stage) {
    if (row >= s.queries) return;
    expect(full + 8 * stage, TILE_BYTES);
    fetch(places + stage * TILE_BYTES, query, full + 8 * stage, row, head, batch);
  };
  int first = blockIdx.y * TILE;
  if (teller) {
    ask(first, 0);
    fetch_keys(keys, values, key, value, came, head, batch);
    for (int i = 1; i < STAGES - 1; i++) ask(first + i * step, i);
  }
  float* of_head = lse + blockIdx.x * static_cast<long long>(s.queries);
  Place<STAGES> at;
  wait(came, 0);
  for (int row = first; row < s.queries; row += step, at.next()) {
    u32 here = places + at.stage * TILE_BYTES, p[SUMS / 2];
    float found[SUMS], sums[32], total[2], logs[2];
    wait(full + 8 * at.stage, at.phase);
    begin_products();
    scores(found, here, keys);
    end_products();
    products_done<0>();
    softmax(found, s.keys, s.scale * LOG2E, p, total, logs);
    begin_products();
    across_overwrite(sums, p, operand(values));
#pragma unroll
    for (int k = 1; k < KEYS / 16; k++) across(sums, p + 4 * k, operand(values + k * 16 * 128));
    end_products();
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (threadIdx.x % 4 == 0 && row + own + 8 * i < s.queries) of_head[row + own + 8 * i] = logs[i];
    products_done<0>();
    put(here, sums, 1.f / total[0], 1.f / total[1]);
    show_to_sender();
    __syncthreads();
    if (teller) {
      send(out, here, row, head, batch);
      sent<1>();  // the tile before has left its place
      ask(row + (STAGES - 1) * step, at.stage == 0 ? STAGES - 1 : at.stage - 1);
    }
  }
  if (teller) sent<0>();
}
