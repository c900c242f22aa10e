// Philox4x32-10 and normal numbers, bit for bit those of engine/random.py, whose tables stand before this text.
//
// Contract: words hold, for each of `samples` samples and each of `count` blocks, the four words of that block. The step
// is at `step` or, where that is null, `host_step`. normals: z[i] is the standard normal number of words[i], by the
// same operations in the same order. Numbers of fp64 are wrapped so that the compiler joins no two of them.
#pragma once
#include "philox.cuh"

struct Exact {
  double v;
};
__device__ __forceinline__ Exact operator+(Exact a, Exact b) { return {__dadd_rn(a.v, b.v)}; }
__device__ __forceinline__ Exact operator-(Exact a, Exact b) { return {__dsub_rn(a.v, b.v)}; }
__device__ __forceinline__ Exact operator*(Exact a, Exact b) { return {__dmul_rn(a.v, b.v)}; }
__device__ __forceinline__ Exact operator/(Exact a, Exact b) { return {__ddiv_rn(a.v, b.v)}; }

template <int N> __device__ __forceinline__ Exact horner(const double (&c)[N], Exact x) {
  Exact total = Exact{c[0]} * x + Exact{c[1]};
#pragma unroll
  for (int i = 2; i < N; i++) total = total * x + Exact{c[i]};
  return total;
}
template <int N> __device__ __forceinline__ Exact ratio(const double (&over)[N], const double (&under)[N], Exact x) {
  return horner(over, x) / horner(under, x);
}

__device__ __forceinline__ Exact exact_log(Exact x) {
  int e;
  Exact m = {frexp(x.v, &e)};
  if (m.v < ROOT_HALF) {
    m = m * Exact{2.0};
    e--;
  }
  Exact s = (m - Exact{1.0}) / (m + Exact{1.0});
  return Exact{2.0} * s * horner(ATANH, s * s) + Exact{(double)e} * Exact{LOG_2};
}

__device__ __forceinline__ Exact normal_quantile(Exact p) {
  Exact q = p - Exact{0.5};
  if (fabs(q.v) <= 0.425) return q * ratio(CENTRE_0, CENTRE_1, Exact{0.180625} - q * q);
  Exact r = {__dsqrt_rn(-exact_log({fmin(p.v, (Exact{1.0} - p).v)}).v)};
  Exact z = r.v <= 5.0 ? ratio(MIDDLE_0, MIDDLE_1, r - Exact{1.6}) : ratio(TAIL_0, TAIL_1, r - Exact{5.0});
  return q.v < 0.0 ? Exact{-z.v} : z;
}

__device__ __forceinline__ float normal(unsigned word) {
  return (float)normal_quantile((Exact{(double)word} + Exact{0.5}) * Exact{1.0 / 4294967296.0}).v;
}

extern "C" __global__ void normals(const unsigned* words, float* z, long long count) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < count) z[i] = normal(words[i]);
}

extern "C" __global__ void philox_words(
    unsigned* words, const long long* samples, const long long* blocks, const long long* step, long long host_step,
    long long stream, long long seed, long long count, long long total) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= total) return;
  const unsigned at = (unsigned)(step ? *step : host_step);
  reinterpret_cast<uint4*>(words)[i] = philox((unsigned)blocks[i % count], at, (unsigned)samples[i / count], (unsigned)stream, keys_of(seed));
}
