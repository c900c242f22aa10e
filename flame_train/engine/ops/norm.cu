// Group normalisation over channels-last memory, forward and gradients.
//
// Contract: x, y, dy, dx are dense, row-major (B, P, C) with C % 8 == 0, 16-byte aligned; w and b hold C
// elements of the same type. mean and rstd are fp32, one a group. All sums are fp32 in a fixed order, so equal
// inputs give equal bits. Outputs are assigned (=), but an input gradient is added to `plus`, of the same type and
// shape, where that is not null; `plus` may be dx itself.
#include "common.cuh"

// ---- group norm -------------------------------------------------------------------------------------------------
//
// A block covers `span` pixels of one image. Thread t owns the eight channels t % (C/8) of the pixels t / (C/8),
// stepping by the block's rows of pixels, and asks for several pixels' packets before it uses the first: memory answers
// late, and few threads must keep it busy. Two sums a channel go through shared memory to two sums a group.
constexpr int AHEAD = 4;           // pixels asked for at once, and where two or three arrays are read
constexpr int GRADIENT_AHEAD = 2;  // half as many, for more would leave no registers
constexpr int THREADS = 512;       // at most: C ends at 4096

// What a thread works on: its channels from `c` on, its pixels from `first` to `last` by `rows`.
struct Lane {
  int c, first, last, rows;
  size_t at;  // of its channels in the image's first pixel
  __device__ __forceinline__ Lane(int P, int C, int span) {
    int vec = C >> 3;
    rows = blockDim.x / vec;
    c = threadIdx.x % vec * 8;
    first = blockIdx.x * span + threadIdx.x / vec;
    last = min((int)(blockIdx.x + 1) * span, P);
    at = (size_t)blockIdx.y * P * C + c;
  }
  // Hands `use` every pixel's values in each of the arrays, and where they lie. The third array may be null, which gives
  // zeros. N pixels' packets are asked for at once.
  template <int N, int ARRAYS, class Use>
  __device__ __forceinline__ void each(const T* const (&arrays)[ARRAYS], int C, Use use) const {
    for (int p = first; p < last; p += N * rows) {
      Packet q[ARRAYS][N];
#pragma unroll
      for (int a = 0; a < ARRAYS; a++)
#pragma unroll
        for (int j = 0; j < N; j++)
          if (p + j * rows < last && (a < 2 || arrays[a])) q[a][j] = read8(arrays[a] + at + (size_t)(p + j * rows) * C);
#pragma unroll
      for (int j = 0; j < N; j++) {
        if (p + j * rows >= last) break;
        float f[ARRAYS][8] = {};
#pragma unroll
        for (int a = 0; a < ARRAYS; a++)
          if (a < 2 || arrays[a]) unpack8(q[a][j], f[a]);
        use(f, at + (size_t)(p + j * rows) * C);
      }
    }
  }
};

// One value a group, spread over a thread's eight channels; `step` apart in `values`.
__device__ __forceinline__ void spread(const float* values, int step, int c, int C, int groups, float* f) {
  int per = C / groups, g = c / per, left = (g + 1) * per - c;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i == left) {
      g++;
      left += per;
    }
    f[i] = values[((size_t)blockIdx.y * groups + g) * step];
  }
}

// A thread's two sums a channel made the block's, in `part` as two sums a group. With `weight` and `rstd` they are those
// of a gradient: the second still lacks its factor rstd, groups' sums want the channels' weighted, and `channels`, where
// not null, is given all of the first and all of the second.
__device__ __forceinline__ void group_sums(const float* s0, const float* s1, int C, int groups, int rows, float* part,
                                           const T* weight = nullptr, const float* rstd = nullptr,
                                           float* channels = nullptr) {
  extern __shared__ float shared[];
  float* a = shared;
  float* b = shared + rows * C;
  int vec = C >> 3, v = threadIdx.x % vec, row = threadIdx.x / vec, per = C / groups;
  if (row < rows) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      a[row * C + v * 8 + i] = s0[i];
      b[row * C + v * 8 + i] = s1[i];
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < C; c += blockDim.x) {
    float t0 = 0.f, t1 = 0.f;
    for (int r = 0; r < rows; r++) {
      t0 += a[r * C + c];
      t1 += b[r * C + c];
    }
    if (rstd) t1 *= rstd[blockIdx.y * groups + c / per];
    if (channels) {
      channels[c] = t0;
      channels[C + c] = t1;
    }
    float by = weight ? to_float(weight[c]) : 1.f;
    a[c] = t0 * by;
    b[c] = t1 * by;
  }
  __syncthreads();
  for (int g = threadIdx.x; g < groups; g += blockDim.x) {
    float t0 = 0.f, t1 = 0.f;
    for (int c = g * per; c < (g + 1) * per; c++) {
      t0 += a[c];
      t1 += b[c];
    }
    part[2 * g] = t0;
    part[2 * g + 1] = t1;
  }
}

// The two sums of image blockIdx.x and group blockIdx.y over all chunks, in every lane of the warp.
__device__ __forceinline__ float2 chunk_sum(const float* part, int chunks, int groups) {
  float2 t = make_float2(0.f, 0.f);
  for (int k = threadIdx.x; k < chunks; k += 32) {
    const float* q = part + (((size_t)blockIdx.x * chunks + k) * groups + blockIdx.y) * 2;
    t.x += q[0];
    t.y += q[1];
  }
  return warp_sum(t);
}

// Sums of (x - pivot) and (x - pivot)^2 a group; the pivot, the group's first value, keeps the squares small.
// grid (chunks, B); part (B, chunks, groups, 2)
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_sums(
    const T* x, float* part, int P, int C, int groups, int span) {
  Lane lane(P, C, span);
  const T* image = x + (size_t)blockIdx.y * P * C;
  int per = C / groups;
  float pivot[8], s0[8] = {0}, s1[8] = {0};
#pragma unroll
  for (int i = 0; i < 8; i++) pivot[i] = to_float(image[(lane.c + i) / per * per]);
  lane.each<AHEAD>({x}, C, [&](const float (&f)[1][8], size_t) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float d = f[0][i] - pivot[i];
      s0[i] += d;
      s1[i] += d * d;
    }
  });
  group_sums(s0, s1, C, groups, lane.rows, part + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * groups * 2);
}

// grid (B, groups), one warp each: chunk sums to mean and rstd
extern "C" __global__ void group_norm_finish(const T* x, const float* part, float* mean, float* rstd, int P, int C,
                                             int groups, int chunks, float eps) {
  int g = blockIdx.y, per = C / groups;
  float2 t = chunk_sum(part, chunks, groups);
  if (threadIdx.x) return;
  float n = (float)P * per, d = t.x / n;
  mean[blockIdx.x * groups + g] = to_float(x[(size_t)blockIdx.x * P * C + g * per]) + d;
  rstd[blockIdx.x * groups + g] = rsqrtf(fmaxf(t.y / n - d * d, 0.f) + eps);
}

// y = (x - mean) * rstd * w + b, through silu if asked. grid (chunks, B)
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_apply(
    const T* x, const T* w, const T* b, const float* mean, const float* rstd, T* y, int P, int C, int groups,
    int span, int silu) {
  Lane lane(P, C, span);
  float m[8], scale[8], shift[8], ga[8];
  spread(mean, 1, lane.c, C, groups, m);
  spread(rstd, 1, lane.c, C, groups, scale);
  load8(w + lane.c, ga);
  load8(b + lane.c, shift);
#pragma unroll
  for (int i = 0; i < 8; i++) scale[i] *= ga[i];
  lane.each<AHEAD>({x}, C, [&](const float (&f)[1][8], size_t at) {
    float made[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float z = (f[0][i] - m[i]) * scale[i] + shift[i];
      made[i] = silu ? z * sigmoid(z) : z;
    }
    store8(y + at, made);
  });
}

// dy carried back through silu, if there is one: the gradient at z, the normalised value scaled and shifted
__device__ __forceinline__ float through(float z, float dy, int silu) {
  if (!silu) return dy;
  float s = sigmoid(z);
  return dy * (s * (1.f + z * (1.f - s)));
}

// Sums of g and g * xhat a group, g being the gradient at the normalised value. As group_norm_sums. `channels`, where not
// null, is (B, chunks, 2, C): sums a channel of the gradients at the scaled and shifted value, by themselves and times
// xhat, which over B and chunks add up to those of bias and weight.
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_gradient_sums(
    const T* x, const T* dy, const T* w, const T* b, const float* mean, const float* rstd, float* part, float* channels,
    int P, int C, int groups, int span, int silu) {
  Lane lane(P, C, span);
  float m[8], scale[8], be[8], s0[8] = {0}, s1[8] = {0};
  spread(mean, 1, lane.c, C, groups, m);
  spread(rstd, 1, lane.c, C, groups, be);
  load8(w + lane.c, scale);
#pragma unroll
  for (int i = 0; i < 8; i++) scale[i] *= be[i];
  load8(b + lane.c, be);
  lane.each<GRADIENT_AHEAD>({x, dy}, C, [&](const float (&f)[2][8], size_t) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float far = f[0][i] - m[i], g = through(far * scale[i] + be[i], f[1][i], silu);
      s0[i] += g;
      s1[i] += g * far;
    }
  });
  size_t chunk = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
  group_sums(s0, s1, C, groups, lane.rows, part + chunk * groups * 2, w, rstd,
             channels ? channels + chunk * 2 * C : nullptr);
}

// grid (B, groups), one warp each: chunk sums to the means of g and of g * xhat
extern "C" __global__ void group_norm_gradient_finish(const float* part, float* means, int P, int C, int groups,
                                                      int chunks) {
  float2 t = chunk_sum(part, chunks, groups);
  if (threadIdx.x) return;
  float n = (float)P * (C / groups);
  float* m = means + (blockIdx.x * groups + blockIdx.y) * 2;
  m[0] = t.x / n;
  m[1] = t.y / n;
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). grid (chunks, B)
extern "C" __global__ void __launch_bounds__(THREADS) group_norm_gradient_apply(
    const T* x, const T* dy, const T* w, const T* b, const float* mean, const float* rstd, const float* means,
    const T* plus, T* dx, int P, int C, int groups, int span, int silu) {
  Lane lane(P, C, span);
  float m[8], r[8], scale[8], be[8], m0[8], m1[8];
  spread(mean, 1, lane.c, C, groups, m);
  spread(rstd, 1, lane.c, C, groups, r);
  spread(means, 2, lane.c, C, groups, m0);
  spread(means + 1, 2, lane.c, C, groups, m1);
  load8(w + lane.c, scale);
  load8(b + lane.c, be);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    scale[i] *= r[i];
    m0[i] *= r[i];
    m1[i] *= r[i] * r[i];
  }
  lane.each<GRADIENT_AHEAD>({x, dy, plus}, C, [&](const float (&f)[3][8], size_t at) {
    float made[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float far = f[0][i] - m[i];
      made[i] = through(far * scale[i] + be[i], f[1][i], silu) * scale[i] - m0[i] - far * m1[i] + f[2][i];
    }
    store8(dx + at, made);
  });
}
