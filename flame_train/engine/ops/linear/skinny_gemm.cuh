// Gradients of LoRA factors by warpgroups (compute capability 9.0): the two thin products of a layer, or of layers of one
// input, in one launch.
//
// A side has `count` products C_i = P_i^T Q_i over `rows` rows: P_i (rows, 16 bands) is columns i 16 bands.. of what `p` maps
// in strips of 16 columns, Q_i (rows, width) item i of what `q` maps in tiles of BLOCK columns. The first side's C_i are
// (16 bands, width), the second's, of up factors, (width, 16 bands), fp32 and dense, c_step apart. What `adds` is added to,
// else assigned. T is bf16 or fp16, sums are fp32 in a fixed order: equal inputs give equal bits. width % 8 == 0.
//
// A block makes COLUMNS columns of one product over `span` rows, a multiple of DEPTH. SHARE blocks, a cluster, have all rows
// and add up among them. A warp fetches DEPTH rows at a time into STAGES places, a warpgroup multiplies. Bound by memory: an
// element of Q is used as often as P has columns. Grid: (tiles of both sides, SHARE); THREADS a block. BANDS, BANDS_UP: of
// either side.
#include "backend/cuda/hopper.cuh"

constexpr int DEPTH = 64, BLOCK = 64, COLUMNS = BLOCK * WIDE, CONSUMERS = 128, THREADS = CONSUMERS + 32;
constexpr int PITCH = COLUMNS + 4;  // of the sums: lanes that write together meet different banks
constexpr u32 BLOCK_BYTES = DEPTH * BLOCK * 2, Q_BYTES = BLOCK_BYTES * WIDE, STRIP_BYTES = DEPTH * 32;
constexpr u32 STAGE_BYTES = Q_BYTES + (BANDS > BANDS_UP ? BANDS : BANDS_UP) * STRIP_BYTES;

struct Side {
  float* c;
  long long c_step;
  int width, count, adds;
  __device__ int across() const { return (width + COLUMNS - 1) / COLUMNS; }
};

// Four numbers of a side's sums, counted along what lies together in C, and where they go: a row of P's, of Q's the first.
template <int ROWS, bool UP> struct Four {
  int row, column;
  __device__ explicit Four(int e)
      : row(UP ? e % ROWS : e / (COLUMNS / 4)), column((UP ? e / ROWS : e % (COLUMNS / 4)) * 4) {}
  __device__ long long place(int first, int width, int i) const {
    long long c = first + column + i;
    return UP ? c * ROWS + row : row * static_cast<long long>(width) + c;
  }
};

template <int N, bool UP>
__device__ __forceinline__ void make(
    const TensorMap& p, const TensorMap& q, const Side& side, int index, int rows, int span, unsigned char* memory,
    u64* barriers
) {
  u32 base = (shared_at(memory) + 1023) & ~1023u, full = shared_at(barriers), empty = full + 8 * STAGES;
  int column = index % side.across() * COLUMNS, item = index / side.across(), first = blockIdx.y * span;
  int steps = max(0, (min(span, rows - first) + DEPTH - 1) / DEPTH);
  float* to = side.c + item * side.c_step;
  Place<STAGES> at;
  float sums[WIDE][8 * N];
#pragma unroll
  for (int i = 0; i < 8 * N * WIDE; i++) sums[i / (8 * N)][i % (8 * N)] = 0.f;
  if (threadIdx.x == CONSUMERS)
    for (int i = 0; i < steps; i++, at.next()) {
      u32 here = base + at.stage * STAGE_BYTES, barrier = full + 8 * at.stage;
      wait(empty + 8 * at.stage, at.phase ^ 1);
      expect(barrier, Q_BYTES + N * STRIP_BYTES);
#pragma unroll
      for (int j = 0; j < WIDE; j++)
        fetch_item(here + j * BLOCK_BYTES, q, barrier, column + j * BLOCK, first + i * DEPTH, item);
#pragma unroll
      for (int j = 0; j < N; j++)
        fetch(here + Q_BYTES + j * STRIP_BYTES, p, barrier, (item * N + j) * 16, first + i * DEPTH);
    }
  else if (threadIdx.x < CONSUMERS) {
    u32 before = 0;
    for (int i = 0; i < steps; i++, at.next()) {
      u32 here = base + at.stage * STAGE_BYTES, thin = here + Q_BYTES;
      wait(full + 8 * at.stage, at.phase);
      begin_products();
#pragma unroll
      for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
        for (int j = 0; j < WIDE; j++)
          turned(sums[j], operand(here + j * BLOCK_BYTES + k * 16 * 128), strip_operand(thin + k * 16 * 32, STRIP_BYTES));
      end_products();
      products_done<1>();
      if (i && threadIdx.x % 32 == 0) arrive_at(empty + 8 * before);
      before = at.stage;
    }
    products_done<0>();
  }
  __syncthreads();  // all places have been read, and hold the sums now
  float* shared = reinterpret_cast<float*>(memory + (base - shared_at(memory)));
  if (threadIdx.x < CONSUMERS) {
    float* own = shared + threadIdx.x % 4 * 2 * PITCH + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 8 * N; i++)
#pragma unroll
      for (int j = 0; j < WIDE; j++) own[(i / 4 * 8 + i % 2) * PITCH + i / 2 % 2 * 8 + j * BLOCK] = sums[j][i];
  }
  cluster_sync();
  for (int e = blockIdx.y * THREADS + threadIdx.x; e < 16 * N * COLUMNS / 4; e += SHARE * THREADS) {
    Four<16 * N, UP> four(e);
    u32 own = shared_at(shared + four.row * PITCH + four.column);
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int block = 0; block < SHARE; block++) total = sum_of(total, four_of(own, block));
    if (column + four.column >= side.width) continue;
    const float made[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& c = to[four.place(column, side.width, i)];
      c = side.adds ? c + made[i] : made[i];
    }
  }
  cluster_sync();
}

extern "C" __cluster_dims__(1, SHARE, 1) __global__ void __launch_bounds__(THREADS) lora_gradients(
    const __grid_constant__ TensorMap inner, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap low,
    const __grid_constant__ TensorMap g, const Side down, const Side up, int rows, int span
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  if (threadIdx.x == 0) {
    u32 full = shared_at(barriers), empty = full + 8 * STAGES;
    for (int i = 0; i < STAGES; i++) begin_barrier(full + 8 * i, 1), begin_barrier(empty + 8 * i, CONSUMERS / 32);
    show_barriers();
  }
  __syncthreads();
  int before = down.across() * down.count;
  if (blockIdx.x < before) make<BANDS, false>(inner, x, down, blockIdx.x, rows, span, memory, barriers);
  else make<BANDS_UP, true>(low, g, up, blockIdx.x - before, rows, span, memory, barriers);
}
