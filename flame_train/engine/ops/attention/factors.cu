// Factors of each query for gradients on tensor cores: -lse in units of log 2 and -sum(g out), (B H, tiles of queries, 2,
// TILE) fp32. Minus infinity and 0 up to a whole tile.
//
// g and out are (B, H, L, width) with dense rows of whole packets at multiples of 16 bytes. Their distances are in elements.
// lse is (B, H, L) fp32. Eight threads a query, 256 a block.
#include "backend/cuda/common.cuh"

constexpr int TILE = 64;

extern "C" __global__ void attention_factors(
    const T* g, long long g_batch, long long g_head, long long g_row, const T* out, long long out_batch, long long out_head,
    long long out_row, const float* lse, float* factors, int batches, int heads, int queries, int width
) {
  int padded = (queries + TILE - 1) / TILE * TILE;
  long long i = (blockIdx.x * 256ll + threadIdx.x) / 8;
  int query = i % padded, head = i / padded % heads, batch = i / padded / heads;
  if (batch >= batches) return;
  bool there = query < queries;
  float drop = 0.f, a[8], b[8];
  for (int column = threadIdx.x % 8 * 8; there && column < width; column += 64) {
    load8(g + batch * g_batch + head * g_head + query * g_row + column, a);
    load8(out + batch * out_batch + head * out_head + query * out_row + column, b);
#pragma unroll
    for (int j = 0; j < 8; j++) drop = fmaf(a[j], b[j], drop);
  }
#pragma unroll
  for (int o = 4; o; o >>= 1) drop += __shfl_xor_sync(0xffffffffu, drop, o);
  if (threadIdx.x % 8) return;
  float* to = factors + i / TILE * 2 * TILE + i % TILE;
  long long row = (batch * heads + head) * static_cast<long long>(queries) + query;
  to[0] = there ? -1.4426950408889634f * lse[row] : __int_as_float(0xff800000);
  to[TILE] = -drop;
}
