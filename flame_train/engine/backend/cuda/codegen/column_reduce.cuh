// Totals of columns over the threads of a block, and over blocks that share columns.
//
// Contract: a block's THREADS, whole warps of them, stand in rows of ACROSS, a power of two up to 32, and each has WIDTH
// neighbouring columns. There are at least as many threads as columns. All orders follow from these numbers and from
// how many blocks there are, never from which of them is first.
#pragma once
#include "backend/cuda/codegen/arrival_counter.cuh"

// The column, counted from a block's first, whose total thread `t` is given.
template <int ACROSS, int WIDTH> __device__ __forceinline__ int column_of(int t) { return t % ACROSS * WIDTH + t / ACROSS; }

// Each thread's values of its columns taken together over the block; for the first ACROSS * WIDTH threads.
template <typename How, int ACROSS, int WIDTH, int THREADS> __device__ __forceinline__ float of_columns(float (&own)[WIDTH]) {
  constexpr int WARPS = THREADS / 32, COLUMNS = ACROSS * WIDTH;
  __shared__ float shared[WARPS][COLUMNS];
#pragma unroll
  for (int o = 16; o >= ACROSS; o >>= 1)
#pragma unroll
    for (int i = 0; i < WIDTH; i++) own[i] = How::of(own[i], __shfl_xor_sync(0xffffffffu, own[i], o));
  __syncthreads();  // an earlier total of the same shape has been read
  if ((threadIdx.x & 31) < ACROSS)
#pragma unroll
    for (int i = 0; i < WIDTH; i++) shared[threadIdx.x >> 5][i * ACROSS + threadIdx.x % ACROSS] = own[i];
  __syncthreads();
  float total = How::none();
  if (threadIdx.x < COLUMNS) {
    total = shared[0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < WARPS; w++) total = How::of(total, shared[w][threadIdx.x]);
  }
  return total;
}

// How a block reads what others have left, COLUMNS values of each in a row: in packets of WIDTH, ACROSS threads to a row.
template <int COLUMNS, int THREADS> struct Left {
  static constexpr int WIDTH = COLUMNS < 4 ? COLUMNS : 4, ACROSS = COLUMNS / WIDTH, LANES = THREADS / ACROSS, AHEAD = 4;
  // Hands `use` the thread's own packets of every row that it reads, one of each of ARRAYS that lie COLUMNS apart, and
  // the row. Rows lie `step` apart; several of them are requested at once.
  template <int ARRAYS, class Use>
  static __device__ __forceinline__ void each(const float* rows, int count, long long step, Use use) {
    const float* own = rows + threadIdx.x % ACROSS * WIDTH;
    for (int row = threadIdx.x / ACROSS; row < count; row += AHEAD * LANES) {
      Packet<float, WIDTH> q[AHEAD][ARRAYS];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
#pragma unroll
        for (int a = 0; a < ARRAYS; a++)
          if (row + k * LANES < count)
            q[k][a] = *reinterpret_cast<const Packet<float, WIDTH>*>(own + (row + k * LANES) * step + a * COLUMNS);
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        if (row + k * LANES < count) use(q[k], row + k * LANES);
    }
  }
};

// What `count` blocks left in rows `step` apart, taken together. Of the first COLUMNS threads each is given a total, that
// of the column by column_of<ACROSS, WIDTH> of `Left`.
template <typename How, int COLUMNS, int THREADS>
__device__ __forceinline__ float of_blocks(const float* rows, int count, long long step) {
  using L = Left<COLUMNS, THREADS>;
  float own[L::WIDTH];
#pragma unroll
  for (int i = 0; i < L::WIDTH; i++) own[i] = How::none();
  L::template each<1>(rows, count, step, [&](const Packet<float, L::WIDTH>* q, int) {
#pragma unroll
    for (int i = 0; i < L::WIDTH; i++) own[i] = How::of(own[i], q->e[i]);
  });
  return of_columns<How, L::ACROSS, L::WIDTH, THREADS>(own);
}

// Whether this block is the last of `blocks` to come here; all its threads then see what the others stored before.
// `counter` is zero before the first of them comes, and again when the last has.
__device__ __forceinline__ bool last_of(unsigned* counter, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = came_before(counter, blocks - 1) == blocks - 1;
  __syncthreads();
  return last;
}
