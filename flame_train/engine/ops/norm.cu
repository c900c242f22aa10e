// Group normalisation over channels-last memory, forward and input gradient.
//
// Contract: x, y, dy, dx are dense, row-major (B, P, C) with C % 8 == 0, 16-byte aligned; w and b hold C
// elements of the same type. mean and rstd are fp32, one a group. All sums are fp32 in a fixed order, so equal
// inputs give equal bits. Outputs are assigned (=), but an input gradient is added to `plus`, of the same type and
// shape, where that is not null; `plus` may be dx itself.
#include "common.cuh"

// ---- group norm -------------------------------------------------------------------------------------------------
//
// A block covers `span` pixels of one image. Thread t owns the eight channels t % (C/8) of the pixels t / (C/8),
// stepping by the block's rows of pixels. Two sums a channel go through shared memory to two sums a group.

__device__ __forceinline__ void group_sums(const float* s0, const float* s1, int C, int groups, int rows, float* part) {
  extern __shared__ float shared[];
  float* a = shared;
  float* b = shared + rows * C;
  int vec = C >> 3, v = threadIdx.x % vec, row = threadIdx.x / vec;
  if (row < rows) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      a[row * C + v * 8 + i] = s0[i];
      b[row * C + v * 8 + i] = s1[i];
    }
  }
  __syncthreads();
  int per = C / groups;
  for (int g = threadIdx.x; g < groups; g += blockDim.x) {
    float t0 = 0.f, t1 = 0.f;
    for (int r = 0; r < rows; r++)
      for (int c = g * per; c < (g + 1) * per; c++) {
        t0 += a[r * C + c];
        t1 += b[r * C + c];
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
extern "C" __global__ void group_norm_sums(const T* x, float* part, int P, int C, int groups, int span) {
  int vec = C >> 3, v = threadIdx.x % vec, row = threadIdx.x / vec, rows = blockDim.x / vec;
  const T* image = x + (size_t)blockIdx.y * P * C;
  int first = blockIdx.x * span, last = min(first + span, P), per = C / groups;
  float pivot[8], s0[8] = {0}, s1[8] = {0};
#pragma unroll
  for (int i = 0; i < 8; i++) pivot[i] = to_float(image[(v * 8 + i) / per * per]);
  if (row < rows)
    for (int p = first + row; p < last; p += rows) {
      float f[8];
      load8(image + (size_t)p * C + v * 8, f);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float d = f[i] - pivot[i];
        s0[i] += d;
        s1[i] += d * d;
      }
    }
  group_sums(s0, s1, C, groups, rows, part + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * groups * 2);
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

// y = (x - mean) * rstd * w + b, through silu if asked; one packet a thread. grid (ceil(P * C / 8 / threads), B)
extern "C" __global__ void group_norm_apply(const T* x, const T* w, const T* b, const float* mean, const float* rstd,
                                            T* y, int P, int C, int groups, int silu) {
  int vec = C >> 3, per = C / groups;
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i >= (size_t)P * vec) return;
  int c = (int)(i % vec) * 8;
  size_t at = (size_t)blockIdx.y * P * C + i * 8;
  float f[8], ga[8], be[8];
  load8(x + at, f);
  load8(w + c, ga);
  load8(b + c, be);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    int g = blockIdx.y * groups + (c + k) / per;
    float z = (f[k] - mean[g]) * rstd[g] * ga[k] + be[k];
    f[k] = silu ? z * sigmoid(z) : z;
  }
  store8(y + at, f);
}

// dy carried back through silu, if there is one, and through the scale w: the gradient at the normalised value
__device__ __forceinline__ float through(float xhat, float dy, float w, float b, int silu) {
  if (silu) {
    float z = xhat * w + b, s = sigmoid(z);
    dy *= s * (1.f + z * (1.f - s));
  }
  return dy * w;
}

// Sums of g and g * xhat a group, g being the gradient at the normalised value. As group_norm_sums.
extern "C" __global__ void group_norm_gradient_sums(const T* x, const T* dy, const T* w, const T* b, const float* mean,
                                                    const float* rstd, float* part, int P, int C, int groups, int span,
                                                    int silu) {
  int vec = C >> 3, v = threadIdx.x % vec, row = threadIdx.x / vec, rows = blockDim.x / vec;
  size_t image = (size_t)blockIdx.y * P * C;
  int first = blockIdx.x * span, last = min(first + span, P), per = C / groups;
  float ga[8], be[8], m[8], r[8], s0[8] = {0}, s1[8] = {0};
  load8(w + v * 8, ga);
  load8(b + v * 8, be);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int g = blockIdx.y * groups + (v * 8 + i) / per;
    m[i] = mean[g];
    r[i] = rstd[g];
  }
  if (row < rows)
    for (int p = first + row; p < last; p += rows) {
      float f[8], d[8];
      load8(x + image + (size_t)p * C + v * 8, f);
      load8(dy + image + (size_t)p * C + v * 8, d);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float xhat = (f[i] - m[i]) * r[i], g = through(xhat, d[i], ga[i], be[i], silu);
        s0[i] += g;
        s1[i] += g * xhat;
      }
    }
  group_sums(s0, s1, C, groups, rows, part + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * groups * 2);
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

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
extern "C" __global__ void group_norm_gradient_apply(const T* x, const T* dy, const T* w, const T* b, const float* mean,
                                                     const float* rstd, const float* means, const T* plus, T* dx,
                                                     int P, int C, int groups, int silu) {
  int vec = C >> 3, per = C / groups;
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i >= (size_t)P * vec) return;
  int c = (int)(i % vec) * 8;
  size_t at = (size_t)blockIdx.y * P * C + i * 8;
  float f[8], d[8], ga[8], be[8], sum[8] = {0};
  load8(x + at, f);
  load8(dy + at, d);
  if (plus) load8(plus + at, sum);
  load8(w + c, ga);
  load8(b + c, be);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    int g = blockIdx.y * groups + (c + k) / per;
    float xhat = (f[k] - mean[g]) * rstd[g];
    f[k] = rstd[g] * (through(xhat, d[k], ga[k], be[k], silu) - means[2 * g] - xhat * means[2 * g + 1]) + sum[k];
  }
  store8(dx + at, f);
}
