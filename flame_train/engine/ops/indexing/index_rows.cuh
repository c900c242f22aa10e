// Rows taken by index, and rows added up by index in an order that does not change.
//
// Contract: x is dense (outer, rows, length), y dense (outer, count, length), with WIDTH dividing length and packets of
// WIDTH elements aligned. Of `out`, (rows, length), those rows alone are assigned that an index names. Sums are fp32.
#pragma once
#include "ops/indexing/index.cuh"

constexpr int FEW = 1024, TILE = 2048, GROUP = 64, ACROSS = 64, LANES = 8, AHEAD = 2;
constexpr int AT_ONCE = 8;  // rows requested before the first is added

typedef Packet<T, WIDTH> Several;
__device__ __forceinline__ Several read(const T* from) { return *reinterpret_cast<const Several*>(from); }
__device__ __forceinline__ void add(const Several& q, float* sum) {
#pragma unroll
  for (int i = 0; i < WIDTH; i++) sum[i] += to_float(q.e[i]);
}

// A thread AHEAD packets of y: all their indices are requested, then all packets, then they are written. `along` packets
// are a row, `count` rows an outer place.
extern "C" __global__ void __launch_bounds__(256) taken(
    const T* __restrict__ x, const I* __restrict__ index, T* __restrict__ y, const unsigned packets, const int rows,
    const unsigned along, const unsigned along_magic, const unsigned along_shift, const unsigned count,
    const unsigned count_magic, const unsigned count_shift) {
  const Divisor by_along{along, along_magic, along_shift}, by_count{count, count_magic, count_shift};
  const unsigned first = blockIdx.x * (256 * AHEAD) + threadIdx.x;
  I found[AHEAD];
  Several q[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
    if (first + j * 256 < packets) found[j] = index[by_count.rest(by_along.quotient(first + j * 256))];
#pragma unroll
  for (int j = 0; j < AHEAD; j++) {
    const unsigned packet = first + j * 256;
    if (packet >= packets) break;
    const long long from = (long long)by_count.quotient(by_along.quotient(packet)) * rows + wrapped(found[j], rows);
    q[j] = read(x + (from * along + by_along.rest(packet)) * WIDTH);
  }
#pragma unroll
  for (int j = 0; j < AHEAD; j++)
    if (first + j * 256 < packets) *reinterpret_cast<Several*>(y + (long long)(first + j * 256) * WIDTH) = q[j];
}

// ---- few places ------------------------------------------------------------------------------------------------------
//
// A block a place and ACROSS packets of columns. It finds all places of the same row, a bit each; the block of the first
// adds them up: each of its LANES takes every LANES-th word of bits, in ascending order. Their sums are added in the
// order of the lanes. grid (places * tiles of ACROSS packets)

// Adds the rows from `place` on whose bits are set.
__device__ __forceinline__ void add_rows(const T* g, unsigned bits, int place, int length, float* sum) {
  while (bits) {
    Several q[AT_ONCE];
    int at[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++, bits &= bits - 1) {
      at[j] = __ffs(bits) - 1;
      if (at[j] >= 0) q[j] = read(g + (long long)(place + at[j]) * length);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (at[j] >= 0) add(q[j], sum);
  }
}

extern "C" __global__ void __launch_bounds__(ACROSS * LANES) few_sums(
    const I* __restrict__ index, const T* __restrict__ g, T* __restrict__ out, const int count, const int rows,
    const int length) {
  __shared__ unsigned equal[FEW / 32];
  __shared__ float parts[LANES][WIDTH][ACROSS];
  const int tiles = (length + ACROSS * WIDTH - 1) / (ACROSS * WIDTH), place = blockIdx.x / tiles;
  const int x = threadIdx.x % ACROSS, lane = threadIdx.x / ACROSS, c = (blockIdx.x % tiles * ACROSS + x) * WIDTH;
  const int row = wrapped(index[place], rows), words = (count + 31) / 32;
  bool earlier = false;
  for (int t = threadIdx.x; t < words * 32; t += ACROSS * LANES) {
    const bool same = t < count && wrapped(index[t], rows) == row;
    const unsigned bits = __ballot_sync(0xffffffffu, same);
    if (t % 32 == 0) equal[t / 32] = bits;
    earlier |= same && t < place;
  }
  if (__syncthreads_or(earlier)) return;
  float sum[WIDTH] = {};
  for (int w = lane; w < words && c < length; w += LANES) add_rows(g + c, equal[w], w * 32, length, sum);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) parts[lane][i][x] = sum[i];
  __syncthreads();
  if (lane || c >= length) return;
#pragma unroll
  for (int l = 1; l < LANES; l++)
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum[i] += parts[l][i][x];
  store<T, WIDTH>(out + (long long)row * length + c, sum);
}

// ---- many places -----------------------------------------------------------------------------------------------------
//
// Keys, row * 2^32 + place, are sorted by tiles of TILE and the tiles merged, so the places of each row are taken in
// ascending order. GROUP keys are then summed by each thread that has their columns. A row whose keys lie in one group is
// assigned. Of others each group leaves a part, fp32, (groups, 2, length): what ends a row begun before, and what begins
// one.
__device__ __forceinline__ int row_of(long long key) { return (int)(key >> 32); }

// grid (tiles): each tile's keys in ascending order
extern "C" __global__ void __launch_bounds__(TILE / 2) sort_tiles(
    const I* index, long long* keys, const int count, const int rows) {
  __shared__ long long shared[TILE];
  const int begin = blockIdx.x * TILE;
  for (int t = threadIdx.x; t < TILE; t += TILE / 2)
    shared[t] = begin + t < count ? (long long)wrapped(index[begin + t], rows) << 32 | (begin + t) : 0x7fffffffffffffffll;
  for (int size = 2; size <= TILE; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      __syncthreads();
      const int low = 2 * threadIdx.x - (threadIdx.x & (step - 1)), high = low + step;
      const long long a = shared[low], b = shared[high];
      if ((a > b) == ((low & size) == 0)) shared[low] = b, shared[high] = a;
    }
  __syncthreads();
  for (int t = threadIdx.x; t < TILE && begin + t < count; t += TILE / 2) keys[begin + t] = shared[t];
}

// A thread a key: its place among all is how many there are below it in each tile.
extern "C" __global__ void __launch_bounds__(256) merge_tiles(const long long* keys, long long* sorted, const int count) {
  const int at = blockIdx.x * 256 + threadIdx.x;
  if (at >= count) return;
  const long long key = keys[at];
  int place = at % TILE;
  for (int tile = 0; tile < count; tile += TILE) {
    if (tile == at / TILE * TILE) continue;
    int low = tile, high = tile + TILE < count ? tile + TILE : count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (keys[middle] < key) low = middle + 1; else high = middle;
    }
    place += low - tile;
  }
  sorted[place] = key;
}

// A thread's group of keys, and its columns from `c` on. grid (groups * tiles of ACROSS packets)
struct Lane {
  int group, first, c;
  __device__ __forceinline__ Lane(int length) {
    const int tiles = (length + ACROSS * WIDTH - 1) / (ACROSS * WIDTH);
    group = blockIdx.x / tiles, first = group * GROUP, c = (blockIdx.x % tiles * ACROSS + threadIdx.x) * WIDTH;
  }
  __device__ __forceinline__ float* part(float* parts, int group, int which, int length) const {
    return parts + (2ll * group + which) * length + c;
  }
};

extern "C" __global__ void __launch_bounds__(ACROSS) sums(
    const long long* __restrict__ keys, const T* __restrict__ g, T* __restrict__ out, float* __restrict__ parts,
    const int count, const int length) {
  const Lane lane(length);
  if (lane.c >= length) return;
  const int last = lane.first + GROUP < count ? lane.first + GROUP : count;
  bool begun = lane.first > 0 && row_of(keys[lane.first - 1]) == row_of(keys[lane.first]);
  float sum[WIDTH] = {};
  for (int p = lane.first; p < last; p += AT_ONCE) {
    int rows[AT_ONCE + 1];
    Several q[AT_ONCE];
#pragma unroll
    for (int j = 0; j <= AT_ONCE; j++) {
      const long long key = p + j < count ? keys[p + j] : -1;
      rows[j] = row_of(key);
      if (j < AT_ONCE && p + j < last) q[j] = read(g + (key & 0xffffffffll) * length + lane.c);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      if (p + j >= last) break;
      add(q[j], sum);
      const bool ends = rows[j + 1] != rows[j];
      if (!ends && p + j + 1 < last) continue;
      if (ends && !begun)
        store<T, WIDTH>(out + (long long)rows[j] * length + lane.c, sum);
      else
        store<float, WIDTH>(lane.part(parts, lane.group, begun ? 0 : 1, length), sum);
      begun = false;
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sum[i] = 0.f;
    }
  }
}

// The rows that lie in several groups, each by the threads of the group in which it begins.
extern "C" __global__ void __launch_bounds__(ACROSS) join_sums(
    const long long* keys, T* out, float* parts, const int count, const int length) {
  const Lane lane(length);
  const int next = lane.first + GROUP;
  if (lane.c >= length || next >= count) return;
  const int row = row_of(keys[next - 1]);
  if (row_of(keys[next]) != row || (lane.first > 0 && row_of(keys[lane.first - 1]) == row)) return;
  float sum[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) sum[i] = lane.part(parts, lane.group, 1, length)[i];
  for (int at = next; at < count && row_of(keys[at]) == row; at += GROUP) {
    const Packet<float, WIDTH> q =
        *reinterpret_cast<const Packet<float, WIDTH>*>(lane.part(parts, at / GROUP, 0, length));
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum[i] += q.e[i];
  }
  store<T, WIDTH>(out + (long long)row * length + lane.c, sum);
}
