// Group normalisation over channels-last memory, forward and gradients, each in one launch.
//
// Contract: x, y, dy, dx are dense, row-major (B, P, C) with C % 8 == 0, 16-byte aligned; w and b hold C
// elements of the same type. mean and rstd are fp32, one a group. All sums are fp32 in a fixed order, so equal
// inputs give equal bits. Outputs are assigned (=), but an input gradient is added to `plus`, of the same type and
// shape, where that is not null; `plus` may be dx itself.
//
// An item is the channels of some whole groups in one image: every image is `splits` items, C / splits channels each,
// a multiple of 8. Grid (blocks an item, items at once), all of them resident; a block is whole rows of an item's
// pixels, C / (8 splits) threads to a pixel, and takes items in turn, of each `span` pixels. It sums up its pixels,
// tells its item's other blocks, and when all have told goes through them once more. Shared memory is a ring of `most`
// pixels a thread, always asked for ahead, the next items' too, so that memory is at work while blocks wait and add:
//  - where pixels of two items have room, an item is finished when the next has been summed up, which hides the wait;
//  - where those of one have, it is finished at once. Either way nothing is read twice;
//  - where they have not, they are read again, last to first, for the last the second cache still holds.
// Beside the ring lie two floats a group of an item, and 64 bytes a thread. `part` is (items, blocks, groups of an item,
// 2) of room, `barriers` two numbers for each item at once.
#include "common.cuh"
#include "copy_async.cuh"
#include "counted.cuh"

constexpr int THREADS = 512;  // at most
constexpr int BEGIN = 192;    // bytes that each asks for, if there is room, before it waits for the first
constexpr int AHEAD = 2;      // packets of `plus` that are on their way to a thread

// ---- what a block works on --------------------------------------------------------------------------------------

// How arrays are cut into items, and items among blocks and threads.
struct Cut {
  int items, P, C, splits, span, width, groups, per;  // `groups` of an item, `per` channels each
  int rows, own;                                      // pixels that a block works on at a time, a thread's first channel
  __device__ __forceinline__ Cut(int B, int P, int C, int all_groups, int splits, int span)
      : items(B * splits), P(P), C(C), splits(splits), span(span), width(C / splits), groups(all_groups / splits),
        per(width / groups) {
    rows = blockDim.x * 8 / width;
    own = threadIdx.x * 8 % width;
  }
  __device__ __forceinline__ int image(int item) const { return item / splits; }
  __device__ __forceinline__ int channel(int item) const { return item % splits * width; }
  __device__ __forceinline__ size_t start(int item) const { return (size_t)image(item) * P * C + channel(item); }
};

// A thread's eight channels in its pixels of ARRAYS arrays, item after item. Places are given up in the order in which
// they were taken, each to the next pixel that will be wanted: by the second pass where it is to find them (`hold`),
// else by every pass; then an item's pixels are asked for once, or there and back (`twice`). What the first pass makes
// of the second array's values it leaves in their place for the second, if that finds them, so as not to make it again.
template <int ARRAYS> struct Ring {
  const Cut& cut;
  const T* arrays[ARRAYS];
  Packet* room;
  int most, step, count;
  size_t first;
  bool hold, twice, late;
  int taken = 0, given = 0;  // the places that are summed up and given up next
  int coming = 0;            // pixels asked for and not waited for yet
  int unused;                // places that no pixel has been given yet
  int next, next_at = 0;     // the item and pixel that are asked for next
  bool returning = false;
  size_t next_first;
  Packet added[AHEAD];
  __device__ __forceinline__ Ring(const Cut& cut, const T* const (&of)[ARRAYS], float* shared, int most, bool again)
      : cut(cut), room(reinterpret_cast<Packet*>(shared) + threadIdx.x), most(most) {
    const int rows = cut.rows, from = blockIdx.x * cut.span + threadIdx.x * 8 / cut.width;
    const int end = min((int)(blockIdx.x + 1) * cut.span, cut.P), each = (cut.span + rows - 1) / rows;
    hold = again && most >= each;
    twice = again && !hold;
    late = hold && most >= 2 * each && cut.items > gridDim.y;
    count = from < end ? (end - from + rows - 1) / rows : 0;
    step = rows * cut.C;
    first = (size_t)from * cut.C + cut.own;
#pragma unroll
    for (int a = 0; a < ARRAYS; a++) arrays[a] = of[a];
    next = count ? blockIdx.y : cut.items;
    next_first = cut.start(next) + first;
    unused = max(0, most - BEGIN / (ARRAYS * (int)sizeof(Packet)));
    while (coming < most - unused) ask();
  }
  __device__ __forceinline__ int after(int place) const { return place + 1 == most ? 0 : place + 1; }
  __device__ __forceinline__ Packet& at(int array, int place) const {
    return room[(array * most + place) * blockDim.x];
  }
  __device__ __forceinline__ void read(int place, float (&f)[ARRAYS][8]) const {
#pragma unroll
    for (int a = 0; a < ARRAYS; a++) unpack8(at(a, place), f[a]);
  }

  // Gives a place to the next pixel; when there is none, to nothing, so that each turn is one group of copies.
  __device__ __forceinline__ void ask() {
    if (next < cut.items) {
      const size_t from = next_first + (size_t)next_at * step;
#pragma unroll
      for (int a = 0; a < ARRAYS; a++) copy_async(&at(a, given), reinterpret_cast<const Packet*>(arrays[a] + from));
      move_on();
    }
    copies_end();
    given = after(given);
    coming++;
  }
  __device__ __forceinline__ void move_on() {
    next_at += returning ? -1 : 1;
    if (0 <= next_at && next_at < count) return;
    const bool turns = twice && !returning;
    next_at = turns ? count - 1 : 0;
    returning = turns;
    if (turns) return;
    next += gridDim.y;
    next_first = cut.start(next) + first;
  }
  __device__ __forceinline__ void arrived() {
    copies_wait_but(--coming);
    taken = after(taken);
  }

  // Hands `use` the values of the next item's pixels, first to last.
  template <class Use> __device__ __forceinline__ void there(Use use) {
    for (int j = 0; j < count; j++) {
      const int place = taken;
      arrived();
      float f[ARRAYS][8];
      read(place, f);
      if (!hold || unused-- > 0) ask();
      use(f);
      if (ARRAYS == 2 && hold) store8(at(1, place).e, f[ARRAYS - 1]);
    }
    for (; unused > 0; unused--) ask();
  }

  // The j-th pixel of an item as the second pass meets them.
  __device__ __forceinline__ size_t again(int item, int j) const {
    return cut.start(item) + first + (size_t)(twice ? count - 1 - j : j) * step;
  }
  __device__ __forceinline__ void ask_plus(const T* plus, int item, int j) {
#pragma unroll
    for (int i = 1; i < AHEAD; i++) added[i - 1] = added[i];
    added[AHEAD - 1] = plus && j < count ? read8(plus + again(item, j)) : Packet{};
  }

  // Hands `use` an item's values once more, with the packet of `plus`, if that is not null, and where they lie. The
  // first AHEAD of `plus` have been asked for.
  template <class Use> __device__ __forceinline__ void back(int item, const T* plus, Use use) {
    for (int j = 0; j < count; j++) {
      if (!hold) arrived();
      float f[ARRAYS][8];
      read(given, f);
      ask();
      const Packet more = added[0];
      ask_plus(plus, item, j + AHEAD);
      use(f, more, again(item, j));
    }
  }
};

// Has `sum` add up every item of the block, and `finish` finish it, `late` by one or not. There are two barriers in
// turn: a block may tell of an item before all have seen that all told of the one before.
template <class Sum, class Finish>
__device__ __forceinline__ void in_turn(const Cut& cut, unsigned* barriers, bool late, Sum sum, Finish finish) {
  const int step = gridDim.y, behind = late ? step : 0;
  unsigned* const own = barriers + 2 * blockIdx.y;
  unsigned odd = 0, earlier, before = 0;
  for (int item = blockIdx.y; item < cut.items + behind; item += step, odd ^= 1) {
    earlier = before;
    if (item < cut.items) {
      sum(item);
      before = told(own + odd);
    }
    if (item < step && late) continue;
    finish(item - behind, [&] { all_told(own + (late ? odd ^ 1 : odd), late ? earlier : before); });
  }
}

// One value a group, spread over a thread's eight channels from `c` on.
template <class Of> __device__ __forceinline__ void spread(int c, int per, float* f, Of of) {
  int g = c / per, left = (g + 1) * per - c;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i == left) {
      g++;
      left += per;
    }
    f[i] = of(g);
  }
}

// ---- sums of a block, and of all blocks of an item -----------------------------------------------------------------

// A thread's two sums a channel made the block's, in `part` as two sums a group, by way of `shared`. With `weight` and
// `rstd` they are those of a gradient: the second still lacks its factor rstd, groups' sums want the channels'
// weighted, and `channels`, where not null, is given all of the first and, after as many as there are in the image, all
// of the second.
__device__ __forceinline__ void block_sums(const Cut& cut, const float* s0, const float* s1, float* shared, float* part,
                                           const T* weight = nullptr, const float* rstd = nullptr,
                                           float* channels = nullptr) {
  const int C = cut.width, groups = cut.groups, per = cut.per, rows = cut.rows, own = threadIdx.x * 8;
  float* a = shared;
  float* b = shared + rows * C;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {  // by fours, which fewer threads of a warp want of one bank
    *reinterpret_cast<float4*>(a + own + i) = make_float4(s0[i], s0[i + 1], s0[i + 2], s0[i + 3]);
    *reinterpret_cast<float4*>(b + own + i) = make_float4(s1[i], s1[i + 1], s1[i + 2], s1[i + 3]);
  }
  __syncthreads();
  // Threads side by side share a group: a power of two of them, within a warp. A last warp that is not whole has none.
  const int whole = blockDim.x & ~31u;
  int log = 0;
  while (log < 5 && groups << (log + 1) <= whole) log++;
  if (threadIdx.x >= whole) return;
  const int shares = 1 << log, share = threadIdx.x & (shares - 1);
  for (int from = 0; from < groups; from += whole >> log) {
    const int g = from + (threadIdx.x >> log);
    float2 t = make_float2(0.f, 0.f);
    for (int c = g * per + share; g < groups && c < (g + 1) * per; c += shares) {
      float t0 = 0.f, t1 = 0.f;
      for (int r = 0; r < rows; r++) {
        t0 += a[r * C + c];
        t1 += b[r * C + c];
      }
      if (rstd) t1 *= rstd[g];
      if (channels) {
        channels[c] = t0;
        channels[cut.C + c] = t1;
      }
      const float by = weight ? to_float(weight[c]) : 1.f;
      t.x += t0 * by;
      t.y += t1 * by;
    }
    for (int o = shares / 2; o; o >>= 1) {
      t.x += __shfl_xor_sync(0xffffffffu, t.x, o);
      t.y += __shfl_xor_sync(0xffffffffu, t.y, o);
    }
    if (share == 0 && g < groups)
      *reinterpret_cast<float2*>(part + 2 * ((size_t)blockIdx.x * groups + g)) = t;
  }
}

// Hands `use` each group and its two sums over all blocks of the item, by one thread a group. As many threads as there
// are read them, for all else waits; `shared` is room for two floats a thread.
template <class Use> __device__ __forceinline__ void item_sums(const float* part, int groups, float* shared, Use use) {
  constexpr int BATCH = 10;
  auto sum = [&](int g, int share, int shares) {
    float2 t = make_float2(0.f, 0.f);
    for (int first = share; first < (int)gridDim.x; first += BATCH * shares) {
      float2 q[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int k = first + i * shares;
        q[i] = make_float2(0.f, 0.f);
        if (k < (int)gridDim.x) q[i] = *reinterpret_cast<const float2*>(part + 2 * ((size_t)k * groups + g));
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        t.x += q[i].x;
        t.y += q[i].y;
      }
    }
    return t;
  };
  const int shares = blockDim.x / groups, g = threadIdx.x % groups;
  if (shares < 2) {
    for (int all = threadIdx.x; all < groups; all += blockDim.x) use(all, sum(all, 0, 1));
    return;
  }
  float2* const found = reinterpret_cast<float2*>(shared);
  if (threadIdx.x < shares * groups) found[threadIdx.x] = sum(g, threadIdx.x / groups, shares);
  __syncthreads();
  if (threadIdx.x >= groups) return;
  float2 t = found[g];
  for (int s = 1; s < shares; s++) {
    t.x += found[s * groups + g].x;
    t.y += found[s * groups + g].y;
  }
  use(g, t);
}

// ---- forward -------------------------------------------------------------------------------------------------------

// y = (x - mean) * rstd * w + b, through silu if asked. Sums are of (x - pivot) and (x - pivot)^2; the pivot, a group's
// first value, keeps the squares small.
extern "C" __global__ void __launch_bounds__(THREADS) group_norm(
    const T* x, const T* w, const T* b, float* mean, float* rstd, T* y, float* part, unsigned* barriers, int B, int P,
    int C, int groups, int splits, int span, int most, float eps, int silu) {
  extern __shared__ float shared[];
  const Cut cut(B, P, C, groups, splits, span);
  Ring<1> ring(cut, {x}, shared, most, true);
  float* const sums = shared + most * blockDim.x * (sizeof(Packet) / sizeof(float));
  float* const found = sums + blockDim.x * 16;
  const float n = (float)P * cut.per;
  auto part_of = [&](int item) { return part + (size_t)item * cut.groups * gridDim.x * 2; };
  auto sum = [&](int item) {
    const T* const pivots = x + cut.start(item);
    float pivot[8], s0[8] = {0}, s1[8] = {0};
    spread(cut.own, cut.per, pivot, [&](int g) { return to_float(pivots[g * cut.per]); });
    ring.there([&](const float (&f)[1][8]) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float d = f[0][i] - pivot[i];
        s0[i] += d;
        s1[i] += d * d;
      }
    });
    block_sums(cut, s0, s1, sums, part_of(item));
  };
  auto finish = [&](int item, auto wait) {
    // Asked for before the wait, after which nothing else is to be waited for.
    const T* const pivots = x + cut.start(item);
    const int here = min((int)threadIdx.x, cut.groups - 1), own = cut.channel(item) + cut.own;
    const float pivot_here = to_float(pivots[here * cut.per]);
    const Packet gain = read8(w + own), offset = read8(b + own);
    wait();
    item_sums(part_of(item), cut.groups, sums, [&](int g, float2 t) {
      const float d = t.x / n, pivot = g == here ? pivot_here : to_float(pivots[g * cut.per]);
      found[2 * g] = pivot + d;
      found[2 * g + 1] = rsqrtf(fmaxf(t.y / n - d * d, 0.f) + eps);
      if (blockIdx.x) return;
      mean[item * cut.groups + g] = found[2 * g];
      rstd[item * cut.groups + g] = found[2 * g + 1];
    });
    __syncthreads();
    float m[8], scale[8], shift[8], by[8];
    spread(cut.own, cut.per, m, [&](int g) { return found[2 * g]; });
    spread(cut.own, cut.per, scale, [&](int g) { return found[2 * g + 1]; });
    unpack8(gain, by);
    unpack8(offset, shift);
#pragma unroll
    for (int i = 0; i < 8; i++) scale[i] *= by[i];
    ring.back(item, nullptr, [&](const float (&f)[1][8], const Packet&, size_t at) {
      float made[8];
#pragma unroll
      for (int i = 0; i < 8; i++) made[i] = (f[0][i] - m[i]) * scale[i] + shift[i];
      if (silu) {
#pragma unroll
        for (int i = 0; i < 8; i++) made[i] *= sigmoid(made[i]);
      }
      store8(y + at, made);
    });
  };
  in_turn(cut, barriers, ring.late, sum, finish);
}

// ---- gradients -----------------------------------------------------------------------------------------------------

// What silu does to a gradient: its derivative at z, the normalised value scaled and shifted.
__device__ __forceinline__ float slope(float z) {
  const float s = sigmoid(z);
  return s * (1.f + z * (1.f - s));
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g being the gradient at the normalised value; left out where dx is
// null. Where a pixel stays in shared memory, g goes there as a T. `channels`, where not null, is (B, blocks, 2, C): sums a channel of the gradients at the scaled and shifted
// value, by themselves and times xhat, which over B and blocks add up to those of bias and weight.
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_gradient(
    const T* x, const T* dy, const T* w, const T* b, const float* mean, const float* rstd, const T* plus, T* dx,
    float* channels, float* part, unsigned* barriers, int B, int P, int C, int groups, int splits, int span, int most,
    int silu) {
  extern __shared__ float shared[];
  const Cut cut(B, P, C, groups, splits, span);
  Ring<2> ring(cut, {x, dy}, shared, most, dx);
  float* const sums = shared + 2 * most * blockDim.x * (sizeof(Packet) / sizeof(float));
  float* const found = sums + blockDim.x * 16;
  const float n = (float)P * cut.per;
  auto part_of = [&](int item) { return part + (size_t)item * cut.groups * gridDim.x * 2; };
  float m[8], scale[8], be[8];
  auto statistics = [&](int item) {
    spread(cut.own, cut.per, m, [&](int g) { return mean[item * cut.groups + g]; });
    spread(cut.own, cut.per, be, [&](int g) { return rstd[item * cut.groups + g]; });
    load8(w + cut.channel(item) + cut.own, scale);
#pragma unroll
    for (int i = 0; i < 8; i++) scale[i] *= be[i];
    load8(b + cut.channel(item) + cut.own, be);
  };
  auto through_silu = [&](float (&f)[2][8]) {
    if (!silu) return;
#pragma unroll
    for (int i = 0; i < 8; i++) f[1][i] *= slope((f[0][i] - m[i]) * scale[i] + be[i]);
  };
  auto sum = [&](int item) {
    statistics(item);
    float s0[8] = {0}, s1[8] = {0};
    ring.there([&](float (&f)[2][8]) {
      through_silu(f);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        s0[i] += f[1][i];
        s1[i] += f[1][i] * (f[0][i] - m[i]);
      }
    });
    float* const row = channels + ((size_t)cut.image(item) * gridDim.x + blockIdx.x) * 2 * C + cut.channel(item);
    block_sums(cut, s0, s1, sums, part_of(item), w + cut.channel(item), rstd + item * cut.groups,
               channels ? row : nullptr);
  };
  auto finish = [&](int item, auto wait) {
    if (!dx) return wait();
    const float* const r = rstd + item * cut.groups;
    const int here = min((int)threadIdx.x, cut.groups - 1);
    const float r_here = r[here];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) ring.ask_plus(plus, item, j);
    if (ring.late) statistics(item);
    wait();
    item_sums(part_of(item), cut.groups, sums, [&](int g, float2 t) {
      const float by = g == here ? r_here : r[g];
      found[2 * g] = t.x / n * by;
      found[2 * g + 1] = t.y / n * by * by;
    });
    __syncthreads();
    float m0[8], m1[8];
    spread(cut.own, cut.per, m0, [&](int g) { return found[2 * g]; });
    spread(cut.own, cut.per, m1, [&](int g) { return found[2 * g + 1]; });
    ring.back(item, plus, [&](float (&f)[2][8], const Packet& more, size_t at) {
      if (!ring.hold) through_silu(f);
      float made[8];
#pragma unroll
      for (int i = 0; i < 8; i++) made[i] = f[1][i] * scale[i] - m0[i] - (f[0][i] - m[i]) * m1[i];
      if (plus) {
        float added[8];
        unpack8(more, added);
#pragma unroll
        for (int i = 0; i < 8; i++) made[i] += added[i];
      }
      store8(dx + at, made);
    });
  };
  in_turn(cut, barriers, ring.late, sum, finish);
}
