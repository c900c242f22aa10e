// Rows taken by index, and rows added up by index in an order that does not change.
//
// Contract: x is dense (outer, rows, length), y dense (outer, count, length), with WIDTH dividing length and packets of
// WIDTH elements aligned. An index that is out of range wraps around, as CuPy's do. `sums` takes the places of each row
// in ascending order: keys, row * 2^32 + place, are sorted by tiles of TILE, a power of two, and the tiles merged. GROUP
// keys are then summed in fp32 by each thread that has their columns. A row whose keys lie in one group is assigned; of
// others each group leaves a part, fp32, (groups, 2, length): what ends a row begun before, and what begins one.
#pragma once

constexpr int GROUP = 64, ACROSS = 64;

__device__ __forceinline__ long long wrapped(long long i, int rows) { return (i % rows + rows) % rows; }
__device__ __forceinline__ int row_of(long long key) { return (int)(key >> 32); }

// A thread a packet of y.
extern "C" __global__ void __launch_bounds__(256) taken(
    const T* x, const I* index, T* y, const int packets, const int rows, const int count, const int length) {
  const int packet = blockIdx.x * 256 + threadIdx.x;
  if (packet >= packets) return;
  const int along = length / WIDTH, at = packet / along, c = packet % along * WIDTH;
  const long long from = (long long)(at / count) * rows + wrapped(index[at % count], rows);
  *reinterpret_cast<Packet<T, WIDTH>*>(y + (long long)packet * WIDTH) =
      *reinterpret_cast<const Packet<T, WIDTH>*>(x + from * length + c);
}

// grid (tiles): each tile's keys in ascending order
extern "C" __global__ void __launch_bounds__(TILE / 2) sort_tiles(
    const I* index, long long* keys, const int count, const int rows) {
  __shared__ long long shared[TILE];
  const int begin = blockIdx.x * TILE;
  for (int t = threadIdx.x; t < TILE; t += TILE / 2)
    shared[t] = begin + t < count ? wrapped(index[begin + t], rows) << 32 | (begin + t) : 0x7fffffffffffffffll;
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
    const long long* keys, const T* g, T* out, float* parts, const int count, const int length) {
  const Lane lane(length);
  if (lane.c >= length) return;
  const int last = lane.first + GROUP < count ? lane.first + GROUP : count;
  bool begun = lane.first > 0 && row_of(keys[lane.first - 1]) == row_of(keys[lane.first]);
  float sum[WIDTH] = {};
#pragma unroll 4
  for (int p = lane.first; p < last; p++) {
    const long long key = keys[p], from = (key & 0xffffffffll) * length + lane.c;
    const Packet<T, WIDTH> q = *reinterpret_cast<const Packet<T, WIDTH>*>(g + from);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum[i] += to_float(q.e[i]);
    const bool ends = p + 1 == count || row_of(keys[p + 1]) != row_of(key);
    if (!ends && p + 1 < last) continue;
    if (ends && !begun)
      store<T, WIDTH>(out + (long long)row_of(key) * length + lane.c, sum);
    else
      store<float, WIDTH>(lane.part(parts, lane.group, begun ? 0 : 1, length), sum);
    begun = false;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum[i] = 0.f;
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

// Elements along the middle dim: y[o, j, i] = x[o, index[o, j, i], i]. A thread an element of y, (outer, count, inner).
extern "C" __global__ void __launch_bounds__(256) elements(
    const T* x, const I* index, T* y, const int size, const int rows, const int count, const int inner) {
  const int at = blockIdx.x * 256 + threadIdx.x;
  if (at >= size) return;
  const long long row = (long long)(at / inner / count) * rows + wrapped(index[at], rows);
  y[at] = x[row * inner + at % inner];
}

// Back: out[o, r, i] is the sum of g[o, j, i] where index[o, j, i] is r, by ascending j, added to base, which may be null.
// A thread an element of out, (outer, rows, inner); it reads all indices of its line.
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
    const long long from = line + (long long)j * inner, found = index[from];
    if (found == row || (found < 0 || found >= rows) && wrapped(found, rows) == row) sum += to_float(g[from]);
  }
  from_float(sum, out[at]);
}
