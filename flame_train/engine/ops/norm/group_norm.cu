// Group normalisation over channels-last memory, forward and gradients, each in one launch.
//
// Contract: y and dy are dense, row-major (B, P, C), 16-byte aligned. The input is (B, P, C) or two arrays, of its first
// `split` channels and of the others. So are its gradient and what that is added to. C % 8 == split % 8 == 0. w and b
// hold C elements of the same type, and `shift`, where not null, (B, C): added to every pixel's channels before all else.
// mean and rstd are fp32, one a group. All sums are fp32 in a fixed order, so equal inputs give equal bits. Outputs are
// assigned (=), but an input gradient is added to `plus` where that is not null; `plus` may be dx itself. A block has 256
// bytes of shared memory a thread, or more.
//
// Grid (blocks an image, images at once), all of them resident; a block is whole rows of pixels, C / 8 threads to a
// pixel. A block sums up its pixels, first to last. It keeps as many as it finds room for in shared memory while it
// waits for the sums of its image's other blocks. Then it goes back from last to first: those without room are read
// again, the latest first, for these the second cache still holds. `part` is (B, blocks, groups, 2) of room, `barriers`
// a number an image.
#include "backend/cuda/common.cuh"
#include "backend/cuda/copy_async.cuh"
#include "backend/cuda/codegen/arrival_counter.cuh"

constexpr int THREADS = 512;                   // at most
constexpr int AHEAD = 128 / sizeof(Packet);    // pixels on their way to a thread while it works on one
constexpr int GRADIENT_AHEAD = AHEAD / 2;      // where each is in two arrays

// ---- what a thread works on -------------------------------------------------------------------------------------

// An input of one array, or of two that share its channels.
struct Halves {
  const T *first, *second;
  int split;
  __device__ __forceinline__ float of(size_t pixel, int C, int c) const {
    return to_float(c < split ? first[pixel * split + c] : second[pixel * (C - split) + c - split]);
  }
};

// Where an array has a thread's channels: in its j-th pixel at place(j).
struct Line {
  size_t at;
  int step;
  __device__ __forceinline__ size_t place(int j) const { return at + (size_t)j * step; }
};

// Its channels from `c` on in `count` pixels of ARRAYS arrays, an input and those with all channels. Each has room for
// `most` of them: for the first pixels for good, and for the others in turn, N at a time.
template <int N, int ARRAYS> struct Lane {
  int c, count, good, most;
  bool later;  // whether the channels lie in the second of two arrays
  Line own, whole;
  const T* arrays[ARRAYS];
  Packet* room;
  __device__ __forceinline__ Lane(int image, int P, int C, int span, int most, float* shared, const Halves& x,
                                  const T* const dy = nullptr)
      : most(most), room(reinterpret_cast<Packet*>(shared)) {
    const int vec = C >> 3, rows = blockDim.x / vec, first = blockIdx.x * span + threadIdx.x / vec;
    const int last = min((int)(blockIdx.x + 1) * span, P);
    c = threadIdx.x % vec * 8;
    count = first < last ? (last - first + rows - 1) / rows : 0;
    good = most - N;
    later = c >= x.split;
    const size_t pixel = (size_t)image * P + first;
    const int width = later ? C - x.split : x.split;
    own = {pixel * width + (later ? c - x.split : c), rows * width};
    whole = {pixel * C + c, rows * C};
    arrays[0] = mine(x.first, x.second);
    if (ARRAYS == 2) arrays[1] = dy;
  }
  template <class A> __device__ __forceinline__ A* mine(A* first, A* second) const { return later ? second : first; }
  __device__ __forceinline__ const Packet* source(int a, int j) const {
    return reinterpret_cast<const Packet*>(arrays[a] + (a ? whole : own).place(j));
  }
  __device__ __forceinline__ Packet* kept(int array, int j) const {
    const int slot = j < good ? j : good + (j - good) % N;
    return room + (array * most + slot) * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ void ask(int j) const {
#pragma unroll
    for (int a = 0; a < ARRAYS; a++) copy_async(kept(a, j), source(a, j));
  }
  __device__ __forceinline__ void read(int j, float (&f)[ARRAYS][8]) const {
#pragma unroll
    for (int a = 0; a < ARRAYS; a++) unpack8(*kept(a, j), f[a]);
  }

  // Brings the pixels in, first to last, and hands `use` their values.
  template <class Use> __device__ __forceinline__ void there(Use use) const {
#pragma unroll
    for (int j = 0; j < N; j++) {
      if (j < count) ask(j);
      copies_end();
    }
    for (int j = 0; j < count; j++) {
      copies_wait<N - 1>();
      float f[ARRAYS][8];
      read(j, f);
      if (j + N < count) ask(j + N);
      copies_end();
      use(f);
    }
  }

  // Hands `use` their values once more, last to first. It hands those of `plus`, which lies as the input, zeros where it
  // is null, and which pixel it is. `turns` is room for N of its packets a thread.
  template <class Use> __device__ __forceinline__ void back(const T* plus, Packet* turns, Use use) const {
    Packet* const own_turns = turns + threadIdx.x;
    auto ask_plus = [&](int j) {
      if (plus && j >= 0) copy_async(own_turns + j % N * blockDim.x, reinterpret_cast<const Packet*>(plus + own.place(j)));
      copies_end();
    };
#pragma unroll
    for (int j = 1; j <= N; j++) ask_plus(count - j);
    for (int j = count - 1; j >= 0; j--) {
      copies_wait<N - 1>();
      float f[ARRAYS][8], added[8] = {};
      read(j, f);
      if (plus) unpack8(own_turns[j % N * blockDim.x], added);
      if (j - N >= good) ask(j - N);
      ask_plus(j - N);
      use(f, added, j);
    }
  }
};

// A thread's part of `shift` (B, C) taken off what its channels are measured from, which is as if it had been added to them.
__device__ __forceinline__ void shifted(const T* shift, int image, int C, int c, float* from) {
  if (!shift) return;
  float by[8];
  load8(shift + (size_t)image * C + c, by);
#pragma unroll
  for (int i = 0; i < 8; i++) from[i] -= by[i];
}

// One value a group, spread over a thread's eight channels; `step` apart in `values`.
__device__ __forceinline__ void spread(const float* values, int step, int c, int C, int groups, float* f) {
  int per = C / groups, g = c / per, left = (g + 1) * per - c;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i == left) {
      g++;
      left += per;
    }
    f[i] = values[g * step];
  }
}

// ---- sums of a block, and of all blocks of an image ----------------------------------------------------------------

// A thread's two sums a channel made the block's, in `part` as two sums a group, by way of `shared`. With `weight` and
// `rstd` they are those of a gradient. The second still lacks its factor rstd, groups' sums want the channels'
// weighted. And `channels`, where not null, is given all of the first and all of the second.
__device__ __forceinline__ void block_sums(const float* s0, const float* s1, int C, int groups, float* shared,
                                           float* part, const T* weight = nullptr, const float* rstd = nullptr,
                                           float* channels = nullptr) {
  const int vec = C >> 3, v = threadIdx.x % vec, row = threadIdx.x / vec, rows = blockDim.x / vec, per = C / groups;
  float* a = shared;
  float* b = shared + rows * C;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {  // by fours, which fewer threads of a warp want of one bank
    *reinterpret_cast<float4*>(a + row * C + v * 8 + i) = make_float4(s0[i], s0[i + 1], s0[i + 2], s0[i + 3]);
    *reinterpret_cast<float4*>(b + row * C + v * 8 + i) = make_float4(s1[i], s1[i + 1], s1[i + 2], s1[i + 3]);
  }
  __syncthreads();
  // Threads side by side share a group: a power of two of them, within a warp. A last warp that is not whole has none.
  const int whole = blockDim.x & ~31u;
  int shares = 1;
  while (shares < 32 && 2 * shares * groups <= whole) shares *= 2;
  if (threadIdx.x >= whole) return;
  for (int from = 0; from < groups; from += whole / shares) {
    const int g = from + threadIdx.x / shares;
    float2 t = make_float2(0.f, 0.f);
    for (int c = g * per + threadIdx.x % shares; g < groups && c < (g + 1) * per; c += shares) {
      float t0 = 0.f, t1 = 0.f;
      for (int r = 0; r < rows; r++) {
        t0 += a[r * C + c];
        t1 += b[r * C + c];
      }
      if (rstd) t1 *= rstd[g];
      if (channels) {
        channels[c] = t0;
        channels[C + c] = t1;
      }
      const float by = weight ? to_float(weight[c]) : 1.f;
      t.x += t0 * by;
      t.y += t1 * by;
    }
    for (int o = shares / 2; o; o >>= 1) {
      t.x += __shfl_xor_sync(0xffffffffu, t.x, o);
      t.y += __shfl_xor_sync(0xffffffffu, t.y, o);
    }
    if (threadIdx.x % shares == 0 && g < groups)
      *reinterpret_cast<float2*>(part + 2 * ((size_t)blockIdx.x * groups + g)) = t;
  }
}

// Hands `use` each group and its two sums over all blocks of the image, by one thread a group. As many threads as there
// are read them, for all else waits; `shared` is room for two floats a thread.
template <class Use> __device__ __forceinline__ void image_sums(const float* part, int groups, float* shared, Use use) {
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

// y = (x - mean) * rstd * w + b, through silu if wanted. Sums are of (x - pivot) and (x - pivot)^2; the pivot, a group's
// first value, keeps the squares small.
extern "C" __global__ void __launch_bounds__(THREADS) group_norm(
    const T* x, const T* x2, const T* shift, const T* w, const T* b, float* mean, float* rstd, T* y, float* part,
    unsigned* barriers, int B, int P, int C, int split, int groups, int span, int most, float eps, int silu) {
  extern __shared__ float shared[];
  float* const sums = shared + most * blockDim.x * (sizeof(Packet) / sizeof(float));
  const int per = C / groups;
  const float n = (float)P * per;
  const Halves input = {x, x2, split};
  for (int image = blockIdx.y; image < B; image += gridDim.y) {
    const Lane<AHEAD, 1> lane(image, P, C, span, most, shared, input);
    float* const own = part + (size_t)image * groups * gridDim.x * 2;
    auto pivot_of = [&](int g) {
      const float by = shift ? to_float(shift[(size_t)image * C + g * per]) : 0.f;
      return input.of((size_t)image * P, C, g * per) + by;
    };
    // Asked for before the wait, after which nothing else is to be waited for.
    const int here = min((int)threadIdx.x, groups - 1);
    const float pivot_here = pivot_of(here);
    const Packet gain = read8(w + lane.c), offset = read8(b + lane.c);
    float pivot[8], s0[8] = {0}, s1[8] = {0};
#pragma unroll
    for (int i = 0; i < 8; i++) pivot[i] = pivot_of((lane.c + i) / per);
    shifted(shift, image, C, lane.c, pivot);
    lane.there([&](const float (&f)[1][8]) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float d = f[0][i] - pivot[i];
        s0[i] += d;
        s1[i] += d * d;
      }
    });
    block_sums(s0, s1, C, groups, sums, own);
    all_here(barriers + image);
    image_sums(own, groups, sums + 2 * groups, [&](int g, float2 t) {
      const float d = t.x / n;
      sums[2 * g] = (g == here ? pivot_here : pivot_of(g)) + d;
      sums[2 * g + 1] = rsqrtf(fmaxf(t.y / n - d * d, 0.f) + eps);
      if (blockIdx.x) return;
      mean[image * groups + g] = sums[2 * g];
      rstd[image * groups + g] = sums[2 * g + 1];
    });
    __syncthreads();
    float m[8], scale[8], add[8], by[8];
    spread(sums, 2, lane.c, C, groups, m);
    shifted(shift, image, C, lane.c, m);
    spread(sums + 1, 2, lane.c, C, groups, scale);
    unpack8(gain, by);
    unpack8(offset, add);
#pragma unroll
    for (int i = 0; i < 8; i++) scale[i] *= by[i];
    lane.back(nullptr, nullptr, [&](const float (&f)[1][8], const float (&)[8], int j) {
      float made[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float z = (f[0][i] - m[i]) * scale[i] + add[i];
        made[i] = silu ? z * sigmoid(z) : z;
      }
      store8(y + lane.whole.place(j), made);
    });
    __syncthreads();  // the next image's sums go where these were
  }
}

// ---- gradients -----------------------------------------------------------------------------------------------------

// dy carried back through silu, if there is one: the gradient at z, the normalised value scaled and shifted
__device__ __forceinline__ float through(float z, float dy, int silu) {
  if (!silu) return dy;
  float s = sigmoid(z);
  return dy * (s * (1.f + z * (1.f - s)));
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g being the gradient at the normalised value; left out where that
// of an array is null. `channels`, where not null, is (B, blocks, 2, C): sums a channel of the gradients at the scaled
// and shifted value, by themselves and times xhat. These over B and blocks add up to those of bias and weight.
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_gradient(
    const T* x, const T* x2, const T* shift, const T* dy, const T* w, const T* b, const float* mean, const float* rstd,
    const T* plus, const T* plus2, T* dx, T* dx2, float* channels, float* part, unsigned* barriers, int B, int P, int C,
    int split, int groups, int span, int most, int silu) {
  extern __shared__ float shared[];
  constexpr int WORDS = sizeof(Packet) / sizeof(float);
  float* const sums = shared + 2 * most * blockDim.x * WORDS;
  Packet* const turns = reinterpret_cast<Packet*>(sums + blockDim.x * 16);
  const float n = (float)P * (C / groups);
  for (int image = blockIdx.y; image < B; image += gridDim.y) {
    const Lane<GRADIENT_AHEAD, 2> lane(image, P, C, span, most, shared, Halves{x, x2, split}, dy);
    const float* const r = rstd + image * groups;
    const int here = min((int)threadIdx.x, groups - 1);
    const float r_here = r[here];
    float* const own = part + (size_t)image * groups * gridDim.x * 2;
    float m[8], scale[8], be[8], s0[8] = {0}, s1[8] = {0};
    spread(mean + image * groups, 1, lane.c, C, groups, m);
    shifted(shift, image, C, lane.c, m);
    spread(r, 1, lane.c, C, groups, be);
    load8(w + lane.c, scale);
#pragma unroll
    for (int i = 0; i < 8; i++) scale[i] *= be[i];
    load8(b + lane.c, be);
    lane.there([&](const float (&f)[2][8]) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float far = f[0][i] - m[i], g = through(far * scale[i] + be[i], f[1][i], silu);
        s0[i] += g;
        s1[i] += g * far;
      }
    });
    block_sums(s0, s1, C, groups, sums, own, w, r,
               channels ? channels + ((size_t)image * gridDim.x + blockIdx.x) * 2 * C : nullptr);
    if (dx || dx2) {
      all_here(barriers + image);
      image_sums(own, groups, sums + 2 * groups, [&](int g, float2 t) {
        const float by = g == here ? r_here : r[g];
        sums[2 * g] = t.x / n * by;
        sums[2 * g + 1] = t.y / n * by * by;
      });
      __syncthreads();
      float m0[8], m1[8];
      spread(sums, 2, lane.c, C, groups, m0);
      spread(sums + 1, 2, lane.c, C, groups, m1);
      T* const made_here = lane.mine(dx, dx2);
      if (made_here) lane.back(lane.mine(plus, plus2), turns, [&](const float (&f)[2][8], const float (&added)[8], int j) {
        float made[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float far = f[0][i] - m[i];
          made[i] = through(far * scale[i] + be[i], f[1][i], silu) * scale[i] - m0[i] - far * m1[i] + added[i];
        }
        store8(made_here + lane.own.place(j), made);
      });
    }
    __syncthreads();  // the next image's sums go where these were
  }
}
