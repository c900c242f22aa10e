// What generated kernels are written in: packets of elements and the functions their expressions use.
//
// Contract: a packet's address is a multiple of its size, at most 16 bytes. Arithmetic is fp32 whatever is stored.
// FAST is 1 where nothing wider than 16 bits is stored. Exponentials then come from the special function unit, with
// relative errors near 2^-21, far below what the result is rounded to.
#pragma once
#include "backend/cuda/codegen/convert.cuh"

#define INFINITE __int_as_float(0x7f800000)

#include "backend/cuda/codegen/e4m3.cuh"
#include "backend/cuda/codegen/int8.cuh"

template <typename S, int N> struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Packet { S e[N]; };

template <typename S, int N> __device__ __forceinline__ void store(S* to, const float* f) {
  Packet<S, N> q;
  if (N == 1) {
    from_float(f[0], q.e[0]);
  } else {
#pragma unroll
    for (int i = 0; i + 1 < N; i += 2) from_two(f[i], f[i + 1], q.e + i);
  }
  *reinterpret_cast<Packet<S, N>*>(to) = q;
}

// Elements from one place to another by all THREADS of a block, `count` of at most MOST; both places 16-byte aligned.
template <typename S, int THREADS, int MOST> __device__ __forceinline__ void carry(S* to, const S* from, unsigned count) {
  constexpr int N = 16 / sizeof(S);
#pragma unroll
  for (int k = 0; k < (MOST / N + THREADS - 1) / THREADS; k++) {
    const unsigned p = threadIdx.x + k * THREADS;
    if (p < count / N) reinterpret_cast<Packet<S, N>*>(to)[p] = reinterpret_cast<const Packet<S, N>*>(from)[p];
  }
  const unsigned rest = count / N * N + threadIdx.x;
  if (rest < count) to[rest] = from[rest];
}

// Division by a number that the host knows, by a multiplication (Granlund and Montgomery): for numbers below 2^31.
struct Divisor {
  unsigned by, magic, shift;
  __device__ __forceinline__ unsigned quotient(unsigned a) const { return (__umulhi(a, magic) + a) >> shift; }
  __device__ __forceinline__ unsigned rest(unsigned a) const { return a - quotient(a) * by; }
};

// ---- functions of expressions ---------------------------------------------------------------------------------------

__device__ __forceinline__ float e_to(float x) { return FAST ? __expf(x) : expf(x); }
__device__ __forceinline__ float sigmoid(float x) { return FAST ? __fdividef(1.f, 1.f + __expf(-x)) : 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
// The logistic function and what it lacks to 1, each to its own last digits: 1 - s would lose them where s is near 1.
struct Logistic {
  float s, rest;
  __device__ __forceinline__ Logistic(float x) {
    float e = e_to(-fmaxf(x, -80.f));
    s = FAST ? __fdividef(1.f, 1.f + e) : 1.f / (1.f + e);
    rest = e * s;
  }
};
__device__ __forceinline__ float silu_derivative(float x) {
  Logistic l(x);
  return l.s + x * l.s * l.rest;
}
// The normal distribution function, `e` being exp(-x^2 / 2). The fast form is formula 7.1.26 of Abramowitz and Stegun,
// to 1e-7, taken on the negative side, where it is small and keeps its digits.
__device__ __forceinline__ float phi(float x, float e) {
  if (!FAST) return 0.5f * (1.f + erff(x * 0.70710678118654752f));
  float t = __fdividef(1.f, 1.f + 0.23164189f * fabsf(x));
  float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  float tail = 0.5f * p * e;
  return x < 0.f ? tail : 1.f - tail;
}
__device__ __forceinline__ float gelu(float x) { return x * phi(x, FAST ? e_to(-0.5f * x * x) : 0.f); }
__device__ __forceinline__ float gelu_derivative(float x) {
  float e = e_to(-0.5f * x * x);
  return phi(x, e) + x * 0.39894228040143268f * e;
}
// Hendrycks and Gimpel's formula: 0.5 (1 + tanh(u)) is sigmoid(2 u)
__device__ __forceinline__ float tanh_argument(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }
__device__ __forceinline__ float gelu_tanh(float x) { return x * sigmoid(tanh_argument(x)); }
__device__ __forceinline__ float gelu_tanh_derivative(float x) {
  Logistic l(tanh_argument(x));
  return l.s + x * l.s * l.rest * 1.5957691216057308f * (1.f + 0.134145f * x * x);
}
// tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2), which is 1 well before e^x is infinite
__device__ __forceinline__ float mish_gate(float x) {
  float e = e_to(fminf(x, 20.f)), n = e * (e + 2.f);
  return n / (n + 2.f);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.f) + log1pf(e_to(-fabsf(x))); }
__device__ __forceinline__ float sign(float x) { return x > 0.f ? 1.f : x < 0.f ? -1.f : x; }
// As NumPy and PyTorch, and unlike fmaxf: NaN stays NaN.
__device__ __forceinline__ float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
#else
  return a > b || a != a ? a : b;
#endif
}
__device__ __forceinline__ float smaller(float a, float b) {
#if __CUDA_ARCH__ >= 800
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
  return a;
#else
  return a < b || a != a ? a : b;
#endif
}

// ---- sums over threads ----------------------------------------------------------------------------------------------

struct Sum {
  static __device__ __forceinline__ float none() { return 0.f; }
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Max {
  static __device__ __forceinline__ float none() { return -INFINITE; }
  static __device__ __forceinline__ float of(float a, float b) { return larger(a, b); }
};
struct Min {
  static __device__ __forceinline__ float none() { return INFINITE; }
  static __device__ __forceinline__ float of(float a, float b) { return smaller(a, b); }
};

// The totals over THREADS neighbouring threads, in every one of them, always in the same order. Beyond a warp the block
// is ROWS times as many. Then `shared`, one float a warp and total, is used by no other totals before the next barrier.
template <typename How, int THREADS, int ROWS = 1, int N>
__device__ __forceinline__ void of_all(float (&v)[N], float (*shared)[32]) {
#pragma unroll
  for (int o = (THREADS < 32 ? THREADS : 32) / 2; o; o >>= 1)
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = How::of(v[j], __shfl_xor_sync(0xffffffffu, v[j], o));
  if (THREADS <= 32) return;
#pragma unroll
  for (int j = 0; j < N; j++)
    if ((threadIdx.x & 31) == 0) shared[j][threadIdx.x >> 5] = v[j];
  __syncthreads();
  const int first = ROWS == 1 ? 0 : threadIdx.x / THREADS * (THREADS / 32);
#pragma unroll
  for (int j = 0; j < N; j++) {
    v[j] = shared[j][first];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++) v[j] = How::of(v[j], shared[j][first + w]);
  }
}
// One of them.
template <typename How, int THREADS> __device__ __forceinline__ float of_all(float v, float* shared) {
  float one[1] = {v};
  of_all<How, THREADS>(one, reinterpret_cast<float (*)[32]>(shared));
  return one[0];
}
