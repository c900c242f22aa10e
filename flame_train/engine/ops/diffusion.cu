// GEGLU with the exact gelu, forward and gradient.
//
// Contract: h is dense (rows, 2 F) = [value, gate], y and dy dense (rows, F), F % 8 == 0, 16-byte aligned. fp32
// arithmetic, outputs assigned (=). One packet of eight a thread.
#include "common.cuh"

__device__ __forceinline__ float phi(float x) { return 0.5f * (1.f + erff(x * 0.70710678118654752f)); }

extern "C" __global__ void geglu_forward(const T* h, T* y, long long packets, int F) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= packets) return;
  int vec = F >> 3;
  long long row = i / vec, c = (i - row * vec) * 8;
  float a[8], g[8];
  load8(h + row * 2 * F + c, a);
  load8(h + row * 2 * F + F + c, g);
#pragma unroll
  for (int k = 0; k < 8; k++) a[k] *= g[k] * phi(g[k]);
  store8(y + row * F + c, a);
}

extern "C" __global__ void geglu_gradient(const T* h, const T* dy, T* dh, long long packets, int F) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= packets) return;
  int vec = F >> 3;
  long long row = i / vec, c = (i - row * vec) * 8;
  float a[8], g[8], d[8];
  load8(h + row * 2 * F + c, a);
  load8(h + row * 2 * F + F + c, g);
  load8(dy + row * F + c, d);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    float p = phi(g[k]), value = d[k] * g[k] * p;
    g[k] = d[k] * a[k] * (p + g[k] * 0.39894228040143268f * expf(-0.5f * g[k] * g[k]));
    a[k] = value;
  }
  store8(dh + row * 2 * F + c, a);
  store8(dh + row * 2 * F + F + c, g);
}
