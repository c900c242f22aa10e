// A copy to memory of another order, in which neighbours of the source do not stay neighbours.
//
// Contract: `source` has its neighbours along `columns`, rows lying `source_step` elements apart, and `target` has its
// neighbours along `rows`, columns lying `target_step` apart. There are matrices of them along up to three outer dims.
// T is what is moved, PACK how many elements at once: sizes, steps and addresses are whole packets. A block moves a
// tile through shared memory, so that its reads and its writes are both of whole rows. A tile is SIDE x SIDE. Each
// element is assigned once. The grid is one-dimensional, with a block for each of `across` x `down` tiles of each matrix.
#pragma once

constexpr int LANES = 32, WARPS = 8, SIDE = LANES * PACK;
typedef Packet<T, PACK> Word;

extern "C" __global__ void __launch_bounds__(LANES * WARPS) transpose(
    const T* __restrict__ source, T* __restrict__ target, const int rows, const int columns,
    const long long source_step, const long long target_step, const int down, const int across,
    const int size0, const long long source0, const long long target0,
    const int size1, const long long source1, const long long target1,
    const long long source2, const long long target2) {
  __shared__ Word tile[SIDE][LANES + 1];  // the odd width spreads a column over the banks
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  unsigned rest = blockIdx.x;
  const int column = rest % across * SIDE;
  rest /= across;
  const int row = rest % down * SIDE;
  rest /= down;
  const unsigned i0 = rest % size0;
  rest /= size0;
  const unsigned i1 = rest % size1, i2 = rest / size1;
  source += i0 * source0 + i1 * source1 + i2 * source2;
  target += i0 * target0 + i1 * target1 + i2 * target2;
  Word read[SIDE / WARPS];  // all are under way before the first is written
#pragma unroll
  for (int r = 0; r < SIDE / WARPS; r++) {
    const int y = row + r * WARPS + warp, x = column + lane * PACK;
    if (y < rows && x < columns) read[r] = *reinterpret_cast<const Word*>(source + y * source_step + x);
  }
#pragma unroll
  for (int r = 0; r < SIDE / WARPS; r++) tile[r * WARPS + warp][lane] = read[r];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < LANES / WARPS; c++) {
    const int word = c * WARPS + warp, x = column + word * PACK, y = row + lane * PACK;
    if (x >= columns || y >= rows) continue;
    Word taken[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++) taken[i] = tile[lane * PACK + i][word];
#pragma unroll
    for (int j = 0; j < PACK; j++) {
      Word made;
#pragma unroll
      for (int i = 0; i < PACK; i++) made.e[i] = taken[i].e[j];
      *reinterpret_cast<Word*>(target + (x + j) * target_step + y) = made;
    }
  }
}
