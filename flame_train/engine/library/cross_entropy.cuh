// Cross entropy in one pass over the logits, and the totals of its losses.
//
// Contract: x is dense (outer, CLASSES, inner), 16-byte aligned, a place being one of outer * inner. Packets of WIDTH
// elements lie along the classes in entropy_rows, where inner is 1, and along inner in entropy_columns; WIDTH divides
// that size. target has a class a place, a whole number G; or, where PROBS is 1, probs has a probability a class, in x's
// shape. weight, one a class, may be null. SPREAD is 1 where every class has a factor, by probs or `smoothing`.
// Sums are fp32 in a fixed order. Outputs are assigned, fp32 and one a place: `max_logit` and `log_sum`, with which a
// class's logarithm is (x - max_logit) - log_sum. Others are `weight_sum`, the sum of the classes' factors, the loss, and
// its weight in a mean.
#pragma once

constexpr int BLOCK = 256;
constexpr int UNROLL = 4;  // classes a thread of entropy_columns asks for at once

// The statistics of a place's classes so far: their maximum, the sum of e^(x - max_logit), and that of the factors, alone
// and times x - pivot. The pivot is the place's first element where it is a number, so that little is lost where all
// are large.
struct Classes {
  float max_logit, sum, weight_sum, product;
  static __device__ __forceinline__ Classes none() { return {-INFINITE, 0.f, 0.f, 0.f}; }
  __device__ __forceinline__ float base() const { return max_logit == -INFINITE ? 0.f : max_logit; }
  __device__ __forceinline__ void raise(float to) {
    float before = base();
    bool any = max_logit != -INFINITE;
    max_logit = fmaxf(max_logit, to);
    if (any) sum *= e_to(before - base());
  }
  template <int N> __device__ __forceinline__ void accumulate(const float (&x)[N], const float (&factor)[N], float pivot) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < N; i++) largest = fmaxf(largest, x[i]);
    raise(largest);
#pragma unroll
    for (int i = 0; i < N; i++) {
      sum += e_to(x[i] - base());
      if (SPREAD && factor[i] != 0.f) weight_sum += factor[i], product += factor[i] * (x[i] - pivot);
    }
  }
  __device__ __forceinline__ void merge(Classes other) {
    raise(other.max_logit);
    other.raise(max_logit);
    sum += other.sum, weight_sum += other.weight_sum, product += other.product;
  }
};

struct Out {
  float *max_logit, *log_sum, *weight_sum, *loss, *loss_weight;
};

// A class's factor, as far as every class has one: `share` is 1 - smoothing of what target says, `even` the rest.
__device__ __forceinline__ float factor_of(const T* probs, const T* weight, long long at, int c, float share, float even) {
  float w = weight ? to_float(weight[c]) : 1.f;
  return w * (PROBS ? to_float(probs[at]) * share + even : even);
}

__device__ __forceinline__ float pivot_of(T first) {
  const float x = to_float(first);
  return x == -INFINITE ? 0.f : x;
}

// Assigns a place's results, `x` being its first class's element and `inner` the step between classes.
__device__ __forceinline__ void finish(
    const Classes& all, const T* x, const G* target, const T* weight, const Out& out, long long place, int classes,
    int inner, float share, long long ignored) {
  float log_sum = logf(all.sum), weight_sum = all.weight_sum, loss_weight = 1.f;
  float loss = SPREAD ? (all.max_logit - pivot_of(x[0]) + log_sum) * weight_sum - all.product : 0.f;
  if (!PROBS) {
    long long t = target[place];
    long long wrapped = (t % classes + classes) % classes;  // where CuPy looks for an index out of range
    loss_weight = t == ignored ? 0.f : weight ? to_float(weight[wrapped]) : 1.f;
    if (t == ignored) loss = weight_sum = 0.f;
    if (t != ignored && t == wrapped) {
      loss += loss_weight * share * (all.max_logit - to_float(x[t * inner]) + log_sum);
      weight_sum += loss_weight * share;
    }
  }
  out.max_logit[place] = all.max_logit, out.log_sum[place] = log_sum, out.weight_sum[place] = weight_sum;
  out.loss[place] = loss, out.loss_weight[place] = loss_weight;
}

// THREADS to a row, of which a block of BLOCK has one or more. grid (rows / (BLOCK / THREADS))
extern "C" __global__ void __launch_bounds__(BLOCK) entropy_rows(
    const T* x, const G* target, const T* probs, const T* weight, float* max_logit, float* log_sum, float* weight_sum,
    float* loss, float* loss_weight, const int rows, const int classes, const float smoothing, const long long ignored) {
  const int lane = threadIdx.x % THREADS, row = blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
  const bool live = row < rows;
  const long long begin = (long long)(live ? row : 0) * classes;
  const float pivot = pivot_of(x[begin]), share = 1.f - smoothing, even = smoothing / classes;
  Classes partial = Classes::none();
  if (live)
#pragma unroll 4
    for (int c = lane * WIDTH; c < classes; c += THREADS * WIDTH) {
      const Packet<T, WIDTH> q = *reinterpret_cast<const Packet<T, WIDTH>*>(x + begin + c);
      float v[WIDTH], factor[WIDTH] = {};
#pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        v[i] = to_float(q.e[i]);
        if (SPREAD) factor[i] = factor_of(probs, weight, begin + c + i, c + i, share, even);
      }
      partial.accumulate(v, factor, pivot);
    }
  __shared__ float shared[4][32];
  Classes all = Classes::none();
  all.max_logit = of_all<Max, THREADS>(partial.max_logit, shared[0]);
  partial.raise(all.max_logit);
  all.sum = of_all<Sum, THREADS>(partial.sum, shared[1]);
  if (SPREAD) {
    all.weight_sum = of_all<Sum, THREADS>(partial.weight_sum, shared[2]);
    all.product = of_all<Sum, THREADS>(partial.product, shared[3]);
  }
  const Out out = {max_logit, log_sum, weight_sum, loss, loss_weight};
  if (live && lane == 0) finish(all, x + begin, target, weight, out, row, classes, 1, share, ignored);
}

// THREADS packets of places side by side, BLOCK / THREADS threads down the classes. grid (outer * tiles)
extern "C" __global__ void __launch_bounds__(BLOCK) entropy_columns(
    const T* x, const G* target, const T* probs, const T* weight, float* max_logit, float* log_sum, float* weight_sum,
    float* loss, float* loss_weight, const int inner, const int classes, const float smoothing, const long long ignored) {
  constexpr int LANES = BLOCK / THREADS, TILE = THREADS * WIDTH;
  const int tiles = (inner + TILE - 1) / TILE, outer = blockIdx.x / tiles, tile = blockIdx.x % tiles * TILE;
  const int y = threadIdx.x / THREADS, mine = tile + threadIdx.x % THREADS * WIDTH;
  const bool live = mine < inner;
  const long long begin = (long long)outer * classes * inner + (live ? mine : 0);
  const float share = 1.f - smoothing, even = smoothing / classes;
  Classes partial[WIDTH];
  float pivot[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) partial[i] = Classes::none(), pivot[i] = pivot_of(x[begin + i]);
  if (live)
    for (int c = y; c < classes; c += LANES * UNROLL) {
      Packet<T, WIDTH> q[UNROLL];
#pragma unroll
      for (int j = 0; j < UNROLL; j++)
        if (c + j * LANES < classes)
          q[j] = *reinterpret_cast<const Packet<T, WIDTH>*>(x + begin + (long long)(c + j * LANES) * inner);
#pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        float v[UNROLL], factor[UNROLL] = {};
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
          const int at = c + j * LANES;
          v[j] = at < classes ? to_float(q[j].e[i]) : -INFINITE;
          if (SPREAD && at < classes)
            factor[j] = factor_of(probs, weight, begin + (long long)at * inner + i, at, share, even);
        }
        partial[i].accumulate(v, factor, pivot[i]);
      }
    }
  __shared__ Classes shared[LANES][TILE];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) shared[y][threadIdx.x % THREADS * WIDTH + i] = partial[i];
  __syncthreads();
  const Out out = {max_logit, log_sum, weight_sum, loss, loss_weight};
  for (int t = threadIdx.x; t < TILE && tile + t < inner; t += BLOCK) {
    Classes all = shared[0][t];
    for (int k = 1; k < LANES; k++) all.merge(shared[k][t]);
    const T* first = x + (long long)outer * classes * inner + tile + t;
    finish(all, first, target, weight, out, (long long)outer * inner + tile + t, classes, inner, share, ignored);
  }
}

// A place's loss from logarithms that are there, as nll_loss has it. One thread a place.
extern "C" __global__ void __launch_bounds__(256) picked(
    const T* x, const G* target, const T* weight, float* loss, float* loss_weight, const int places, const int classes,
    const int inner, const long long ignored) {
  const int place = blockIdx.x * 256 + threadIdx.x;
  if (place >= places) return;
  const bool counts = target[place] != ignored;
  const long long t = counts ? target[place] : 0, wrapped = (t % classes + classes) % classes;
  const float w = counts ? weight ? to_float(weight[wrapped]) : 1.f : 0.f;
  const float x_t = to_float(x[((long long)(place / inner) * classes + wrapped) * inner + place % inner]);
  loss[place] = counts ? -w * x_t : 0.f;  // an ignored logit may be infinite
  loss_weight[place] = w;
}

// The totals of each block's `span` places; of one block also the result, loss over weight or the loss alone.
extern "C" __global__ void __launch_bounds__(512) totals(
    const float* loss, const float* loss_weight, float* losses, float* weights, T* result, const int places,
    const int span, const int mean) {
  const int first = blockIdx.x * span, last = first + span < places ? first + span : places;
  float a = 0.f, b = 0.f;
#pragma unroll 4
  for (int p = first + threadIdx.x; p < last; p += 512) a += loss[p], b += loss_weight[p];
  __shared__ float shared[2][32];
  a = of_all<Sum, 512>(a, shared[0]);
  b = of_all<Sum, 512>(b, shared[1]);
  if (threadIdx.x) return;
  losses[blockIdx.x] = a, weights[blockIdx.x] = b;
  if (gridDim.x == 1) from_float(mean ? a / b : a, *result);
}
