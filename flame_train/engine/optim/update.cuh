// The optimizer's passes over the flat arena: sums of the gradient's squares, and what the update by any rule is made of.
//
// Contract: buffers hold n elements, n a multiple of 64, and are 16-byte aligned. `low`, the working copy in T, `mean`, the
// moving average, and `lr_scale` may be null. Of each 64 elements `filled` are no padding.
// The numbers of a step are read from `now`. How they are named stands before this text, with the tables of random.cuh,
// and so do NOISE, STREAM and CHUNK. `count` was advanced by the step already, if it is taken; if not, nothing changes.
// Products and sums are rounded one by one, in the order of optim's links, rules and average: the bits are theirs.
#include "backend/cuda/codegen/block_sum.cuh"
#include "random.cuh"

typedef Packet<float, 4> Four;

__device__ __forceinline__ Four four(const float* from, long long i) { return *reinterpret_cast<const Four*>(from + i); }
__device__ __forceinline__ float limited(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }
__device__ __forceinline__ double squared(float x) { return (double)__fmul_rn(x, x); }

// x / by, rounded once. A power of two, as loss scales and most accumulations are, divides by a multiplication with its
// inverse, which is exact: the bits are the same, for fewer instructions.
__device__ __forceinline__ float divided(float x, float by) {
  const unsigned bits = __float_as_uint(by);
  if ((bits & 0x7fffffu) == 0 && bits - 0x00800000u < 0x7e000000u) return __fmul_rn(x, __int_as_float(0x7f000000u - bits));
  return __fdiv_rn(x, by);
}

// Sums of squares in fp64, one a block, of g / (scale * accumulation), and of the same within `limit`, which may be null.
// The order of sums depends on n and the grid alone.
extern "C" __global__ void __launch_bounds__(256) squares(const float* g, const float* scale, float accumulation,
                                                          const float* limit, double* whole, double* within, long long n) {
  const float by = __fmul_rn(*scale, accumulation), most = limit ? *limit : 0.f;
  double all = 0.0, some = 0.0;
  for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * 4; i < n; i += (long long)gridDim.x * blockDim.x * 4) {
    const Four f = four(g, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float x = divided(f.e[k], by);
      all += squared(x);
      if (limit) some += squared(limited(x, most));
    }
  }
  all = block_sum<256>(all);
  if (limit) some = block_sum<256>(some);
  if (threadIdx.x) return;
  whole[blockIdx.x] = all;
  if (limit) within[blockIdx.x] = some;
}

// What all rules have in common, for four elements from i. The kernel of a rule is generated (fused.py), or its own.
struct FlatParameters {
  const float* grads;
  float *values, *mean;
  T* low;
  const float *lr_scale, *decay_scale;
  const unsigned char* filled;
  const float* now;
  const long long* count;
  long long seed;

  // As the links before the rule hand it on.
  __device__ __forceinline__ Four gradient(long long i) const {
    Four g = four(grads, i);
#pragma unroll
    for (int k = 0; k < 4; k++) g.e[k] = __fmul_rn(limited(divided(g.e[k], now[DIVISOR]), now[LIMIT]), now[CLIP]);
    if constexpr (NOISE) {
      const uint4 w = philox((unsigned)(i % CHUNK / 4), (unsigned)(*count - 1), (unsigned)(i / CHUNK), STREAM, keys_of(seed));
      const unsigned words[4] = {w.x, w.y, w.z, w.w};
      const int left = filled[i / 64] - (int)(i % 64);
#pragma unroll
      for (int k = 0; k < 4; k++)
        g.e[k] = k < left ? __fadd_rn(g.e[k], __fmul_rn(now[STD], normal(words[k]))) : 0.f;
    }
    return g;
  }

  // The same for the element i alone.
  __device__ __forceinline__ float gradient_at(long long i) const {
    if constexpr (NOISE) return gradient(i / 4 * 4).e[i % 4];
    return __fmul_rn(limited(divided(grads[i], now[DIVISOR]), now[LIMIT]), now[CLIP]);
  }

  __device__ __forceinline__ Four rates(long long i) const {
    Four r = lr_scale ? four(lr_scale, i) : Four{1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int k = 0; k < 4; k++) r.e[k] = __fmul_rn(now[RATE], r.e[k]);
    return r;
  }

  // step + weight_decay * p.
  __device__ __forceinline__ Four decayed(Four step, const Four& p, float weight_decay, long long i) const {
    if (weight_decay == 0.f) return step;
    const Four scale = decay_scale ? four(decay_scale, i) : Four{1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int k = 0; k < 4; k++)
      step.e[k] = __fadd_rn(step.e[k], __fmul_rn(__fmul_rn(weight_decay, scale.e[k]), p.e[k]));
    return step;
  }

  // Values p go a step, at the learning rate.
  __device__ __forceinline__ void move(const Four& p, Four step, long long i) const {
    const Four r = rates(i);
#pragma unroll
    for (int k = 0; k < 4; k++) step.e[k] = __fmul_rn(r.e[k], step.e[k]);
    change(p, step, i);
  }

  // Values p are less by `moved`; the working copy and the average follow.
  __device__ __forceinline__ void change(Four p, const Four& moved, long long i) const {
#pragma unroll
    for (int k = 0; k < 4; k++) p.e[k] = __fsub_rn(p.e[k], moved.e[k]);
    store<float, 4>(values + i, p.e);
    if (low) store<T, 4>(low + i, p.e);
    if (!mean) return;
    Four m = four(mean, i);
#pragma unroll
    for (int k = 0; k < 4; k++) m.e[k] = __fsub_rn(m.e[k], __fmul_rn(now[AVERAGE], __fsub_rn(m.e[k], p.e[k])));
    store<float, 4>(mean + i, m.e);
  }
};
