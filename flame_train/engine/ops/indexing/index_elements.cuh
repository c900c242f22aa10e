// Elements along the middle dim taken by index, and added up by index in an order that does not change.
//
// Contract: x and out are dense (outer, rows, inner), y, g and index dense (outer, count, inner). What has the same outer
// and inner place is a line. Outputs are assigned; of `out` those elements alone that an index names, by leader_sums, or
// all, by element_sums. Sums are fp32.
#pragma once
#include "ops/indexing/index.cuh"

// y[o, j, i] = x[o, index[o, j, i], i]. A thread an element of y.
extern "C" __global__ void __launch_bounds__(256) elements(
    const T* x, const I* index, T* y, const int size, const int rows, const int count, const int inner) {
  const int at = blockIdx.x * 256 + threadIdx.x;
  if (at >= size) return;
  const long long row = (long long)(at / inner / count) * rows + wrapped(index[at], rows);
  y[at] = x[row * inner + at % inner];
}

// Back, where a line has more indices than elements. Then out[o, r, i] is the sum of g[o, j, i] where index[o, j, i] is r, by
// ascending j. It is added to base, which may be null. A thread an element of out; it reads all indices of its line.
extern "C" __global__ void __launch_bounds__(256) element_sums(
    const T* g, const I* index, const T* base, T* out, const int size, const int rows, const int count,
    const int inner) {
  const int at = blockIdx.x * 256 + threadIdx.x;
  if (at >= size) return;
  const int row = at / inner % rows;
  const long long line = (long long)(at / inner / rows) * count * inner + at % inner;
  float sum = base ? to_float(base[at]) : 0.f;
#pragma unroll 4
  for (int j = 0; j < count; j++) {
    const long long from = line + (long long)j * inner;
    if (wrapped(index[from], rows) == row) sum += to_float(g[from]);
  }
  from_float(sum, out[at]);
}

// Where the block's thread is: in line `line`, with the SPAN-th part of its indices that begins at `begin`. Neighbours in
// a warp are neighbours in memory, so with an inner dim they are in neighbouring lines.
constexpr int LINES = 256 / SPAN;
struct Spot {
  int line, along, begin, slot;  // slot: of the line among the block's
  bool live;
  long long first;  // of the line's indices
  __device__ __forceinline__ Spot(int lines, int count, int inner) {
    const int spans = (count + SPAN - 1) / SPAN;
    slot = inner == 1 ? threadIdx.x / SPAN : threadIdx.x % LINES;
    along = inner == 1 ? threadIdx.x % SPAN : threadIdx.x / LINES;
    line = blockIdx.x / spans * LINES + slot, begin = blockIdx.x % spans * SPAN, live = line < lines;
    first = (long long)(line / inner) * count * inner + line % inner;
  }
};

// Back, where a line has fewer: a thread an index. The first of a line's equal indices adds up what all of them bring, by
// ascending j, and is the only one to write: to what base, which is null or out, holds there. All indices and values of
// the line pass through shared memory, SPAN at a time, the next on their way while these are compared.
extern "C" __global__ void __launch_bounds__(256) leader_sums(
    const T* g, const I* index, const T* base, T* out, const int lines, const int rows, const int count,
    const int inner) {
  constexpr int PITCH = SPAN + 4;  // packets of four, and no two lines' in the same banks
  __shared__ __align__(16) int found[LINES][PITCH];
  __shared__ __align__(16) float values[LINES][PITCH];
  const Spot spot(lines, count, inner);
  const int own = spot.begin + spot.along;
  const bool writes = spot.live && own < count;
  const int row = writes ? wrapped(index[spot.first + (long long)own * inner], rows) : -2;
  const long long to = ((long long)(spot.line / inner) * rows + row) * inner + spot.line % inner;
  float sum = writes && base ? to_float(base[to]) : 0.f;
  int leader = own, next = -1;
  float value = 0.f;
  const auto read = [&](int j) {
    const bool there = spot.live && j < count;
    next = there ? wrapped(index[spot.first + (long long)j * inner], rows) : -1;
    value = there ? to_float(g[spot.first + (long long)j * inner]) : 0.f;
  };
  read(spot.along);
  for (int begin = 0; begin < count; begin += SPAN) {
    found[spot.slot][spot.along] = next, values[spot.slot][spot.along] = value;
    __syncthreads();
    read(begin + SPAN + spot.along);
    const int last = count - begin < SPAN ? count - begin : SPAN;
    for (int k = 0; k < last; k += 4) {
      const Packet<int, 4> those = *reinterpret_cast<const Packet<int, 4>*>(found[spot.slot] + k);
      const Packet<float, 4> bring = *reinterpret_cast<const Packet<float, 4>*>(values[spot.slot] + k);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (those.e[i] == row) sum += bring.e[i], leader = min(leader, begin + k + i);
    }
    if (!__syncthreads_or(writes && leader == own)) return;
  }
  if (writes && leader == own) from_float(sum, out[to]);
}
