// A stable radix sort of rows: the values in rising or falling order, and the place that each had. A pass orders by eight
// bits, the first by the lowest. NaN counts as larger than every number, and -0 as equal to 0.
//
// Contract: arrays are dense (rows, n), n below 2^31. INFINITY_BITS are those of infinity as a T. A tile is TILE values
// of a row, a block's, and a row has `tiles` of them; `counts` is (rows, tiles, DIGITS). What is found does not depend
// on the order in which threads come.
#pragma once

constexpr int DIGITS = 256, WARPS = 8, BLOCK = 32 * WARPS, TILE = BLOCK * ITEMS;  // a digit is eight bits, a thread's own
constexpr unsigned ALL = 0xffffffffu;

template <int BYTES> struct Word { typedef unsigned short Bits; };
template <> struct Word<4> { typedef unsigned Bits; };
typedef Word<sizeof(T)>::Bits Bits;  // values are moved as these, so that none changes

// The digit from bit `shift` on of a number that is the larger, the later the value comes.
__device__ __forceinline__ unsigned digit_of(Bits value, int shift) {
  constexpr unsigned SIGN = 1u << (8 * sizeof(T) - 1);
  const unsigned bits = value, size = bits & (SIGN - 1);
  unsigned key = bits & SIGN ? ~bits : bits | SIGN;
  if (size == 0) key = SIGN;
  if (size > INFINITY_BITS) key = ~0u;
  return (DESCENDING ? ~key : key) >> shift & (DIGITS - 1);
}

// The sum of what the threads before this one have, of a block of COUNT warps.
template <int COUNT> __device__ __forceinline__ unsigned sum_before(unsigned own, unsigned* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned through = own;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const unsigned lower = __shfl_up_sync(ALL, through, o);
    if (lane >= o) through += lower;
  }
  if (lane == 31) sums[warp] = through;
  __syncthreads();
  unsigned before = through - own;
#pragma unroll
  for (int w = 0; w < COUNT; w++)
    if (w < warp) before += sums[w];
  return before;
}

struct Tile {
  unsigned counts[WARPS][DIGITS], sums[WARPS];
  Bits values[TILE];
  int places[TILE];
};

// The place in the tile of this thread's first value; the next are each a warp further.
__device__ __forceinline__ int first_of_thread() { return threadIdx.x / 32 * (32 * ITEMS) + threadIdx.x % 32; }

// The lanes of the warp that have the same digit.
__device__ __forceinline__ unsigned lanes_with(unsigned digit) {
  unsigned same = ALL;
#pragma unroll
  for (int b = 1; b < DIGITS; b *= 2) {
    const unsigned set = __ballot_sync(ALL, digit & b);
    same &= digit & b ? set : ~set;
  }
  return same;
}

// `to` becomes where each of the thread's values comes in the tile by its digit alone. The tile has `count` values; what
// lies beyond stays there. Returns how many values have a digit below threadIdx.x.
__device__ __forceinline__ unsigned rank(
    Tile& tile, const Bits (&values)[ITEMS], int count, int shift, unsigned (&to)[ITEMS]) {
  const int lane = threadIdx.x % 32, first = first_of_thread();
  unsigned* const mine = tile.counts[threadIdx.x / 32];
#pragma unroll
  for (int d = lane; d < DIGITS; d += 32) mine[d] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const unsigned digit = first + i * 32 < count ? digit_of(values[i], shift) : DIGITS - 1;
    const unsigned same = lanes_with(digit), lower = __popc(same & ((1u << lane) - 1)), before = mine[digit];
    to[i] = digit << 16 | (before + lower);
    __syncwarp();  // all have read
    if (lower == 0) mine[digit] = before + __popc(same);
    __syncwarp();
  }
  __syncthreads();
  unsigned all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += tile.counts[w][threadIdx.x];
  const unsigned start = sum_before<WARPS>(all, tile.sums);
  unsigned at = start;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const unsigned of_warp = tile.counts[w][threadIdx.x];
    tile.counts[w][threadIdx.x] = at, at += of_warp;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; i++) to[i] = (to[i] & 0xffff) + mine[to[i] >> 16];
  return start;
}

// ---- rows of one tile: a block a row ----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(BLOCK) sort_short_rows(
    const T* __restrict__ x, T* __restrict__ values, long long* __restrict__ index, const int n) {
  __shared__ Tile tile;
  const long long row = blockIdx.x * (long long)n;
  const int first = first_of_thread();
  const Bits* const from = reinterpret_cast<const Bits*>(x) + row;
  Bits own[ITEMS];
  int places[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    places[i] = first + i * 32;
    own[i] = places[i] < n ? from[places[i]] : 0;
  }
  for (int shift = 0; shift < 8 * sizeof(T); shift += 8) {
    unsigned to[ITEMS];
    rank(tile, own, n, shift, to);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) tile.values[to[i]] = own[i], tile.places[to[i]] = places[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) own[i] = tile.values[first + i * 32], places[i] = tile.places[first + i * 32];
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int at = first + i * 32;
    if (at < n) reinterpret_cast<Bits*>(values)[row + at] = own[i], index[row + at] = places[i];
  }
}

// ---- longer rows: for each pass these three ---------------------------------------------------------------------------

// How often each digit is in each tile. A block has a tile.
extern "C" __global__ void __launch_bounds__(BLOCK) count_digits(
    const T* __restrict__ x, int* __restrict__ counts, const int n, const int tiles, const int shift) {
  constexpr int COPIES = 4;  // where all values are alike, fewer lanes wait for the same counter
  __shared__ unsigned found[DIGITS * COPIES];
  const long long row = blockIdx.x / tiles;
  const int begin = blockIdx.x % tiles * TILE + threadIdx.x;
  const Bits* const from = reinterpret_cast<const Bits*>(x) + row * n;
#pragma unroll
  for (int i = 0; i < COPIES; i++) found[i * DIGITS + threadIdx.x] = 0;
  Bits own[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) own[i] = begin + i * BLOCK < n ? from[begin + i * BLOCK] : 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (begin + i * BLOCK < n) atomicAdd(found + digit_of(own[i], shift) * COPIES + threadIdx.x % COPIES, 1u);
  __syncthreads();
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < COPIES; i++) sum += found[threadIdx.x * COPIES + i];
  counts[blockIdx.x * (long long)DIGITS + threadIdx.x] = sum;
}

// In place of each count, how many values of the row come before: those of smaller digits, and this one's in tiles
// before. A block has a row, PARTS threads a digit.
constexpr int PARTS = 4;
extern "C" __global__ void __launch_bounds__(DIGITS* PARTS) place_digits(int* __restrict__ counts, const int tiles) {
  constexpr int AT_ONCE = 8;
  __shared__ unsigned parts[PARTS][DIGITS], starts[DIGITS], sums[DIGITS * PARTS / 32];
  const int digit = threadIdx.x % DIGITS, part = threadIdx.x / DIGITS, stretch = (tiles + PARTS - 1) / PARTS;
  const int first = part * stretch, end = min(first + stretch, tiles);
  counts += blockIdx.x * (long long)tiles * DIGITS + digit;
  unsigned sum = 0;
#pragma unroll 8
  for (int t = first; t < end; t++) sum += counts[t * (long long)DIGITS];
  parts[part][digit] = sum;
  __syncthreads();
  unsigned all = 0, at = 0;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    if (p == part) at = all;
    all += parts[p][digit];
  }
  const unsigned start = sum_before<DIGITS * PARTS / 32>(part == 0 ? all : 0, sums);
  if (part == 0) starts[digit] = start;
  __syncthreads();
  at += starts[digit];
  for (int t = first; t < end; t += AT_ONCE) {
    unsigned count[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) count[i] = t + i < end ? counts[(t + i) * (long long)DIGITS] : 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (t + i < end) counts[(t + i) * (long long)DIGITS] = at;
      at += count[i];
    }
  }
}

// Values and places to where they come by the digit. A tile is put in order in shared memory first, so that neighbours
// are written together. `from` is null in the first pass, where places are those of x; `index` gets the last pass's
// places, `to` those of the others.
extern "C" __global__ void __launch_bounds__(BLOCK, 4) move_by_digits(
    const T* __restrict__ x, const int* __restrict__ from, T* __restrict__ values, int* __restrict__ to,
    long long* __restrict__ index, const int* __restrict__ places, const int n, const int tiles, const int shift) {
  __shared__ Tile tile;
  __shared__ int starts[DIGITS];
  const long long row = blockIdx.x / tiles * (long long)n;
  const int begin = blockIdx.x % tiles * TILE, count = min(TILE, n - begin), first = first_of_thread();
  const Bits* const given = reinterpret_cast<const Bits*>(x) + row + begin;
  Bits own[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) own[i] = first + i * 32 < count ? given[first + i * 32] : 0;
  const int place = places[blockIdx.x * (long long)DIGITS + threadIdx.x];
  unsigned at[ITEMS];
  starts[threadIdx.x] = place - (int)rank(tile, own, count, shift, at);
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int p = first + i * 32;
    tile.values[at[i]] = own[i];
    tile.places[at[i]] = from && p < count ? from[row + begin + p] : begin + p;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int p = i * BLOCK + threadIdx.x;
    if (p >= count) break;
    const Bits value = tile.values[p];
    const long long there = row + starts[digit_of(value, shift)] + p;
    reinterpret_cast<Bits*>(values)[there] = value;
    if (index)
      index[there] = tile.places[p];
    else
      to[there] = tile.places[p];
  }
}
