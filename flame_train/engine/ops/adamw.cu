// The optimizer's passes over the flat arena: the gradient's norm, one AdamW update, and a moving average.
//
// Contract: all buffers hold n elements, n % 4 == 0, 16-byte aligned; `low` is the working copy in T, or null. Scalars
// that change from step to step are read from the device. Products and sums are rounded one by one, in the order of
// optim/rules.py and average.py, so that both ways give the same bits.
#include "common.cuh"

// Sums of squares of g / divisor, in fp64, one a block; the order of sums depends on n and the grid alone.
extern "C" __global__ void squares(const float* g, const float* divisor, double* part, long long n) {
  float by = *divisor;
  double s = 0.0;
  for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * 4; i < n; i += (long long)gridDim.x * blockDim.x * 4) {
    float4 f = *reinterpret_cast<const float4*>(g + i);
    float e[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float x = __fdiv_rn(e[k], by);
      s += (double)__fmul_rn(x, x);
    }
  }
  __shared__ double shared[256];
  shared[threadIdx.x] = s;
  for (int half = blockDim.x >> 1; half; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) part[blockIdx.x] = shared[0];
}

// values, exp_avg, exp_avg_sq and low after one step; all as before where *take is false.
extern "C" __global__ void adamw(const float* grad, float* values, float* exp_avg, float* exp_avg_sq, T* low,
                                 const float* lr_scale, const float* decay_scale, const float* divisor,
                                 const float* clip, const float* lr, const float* first, const float* second,
                                 const bool* take, float b1, float rest1, float b2, float rest2, float eps, float decay,
                                 long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= n || !*take) return;
  float g = __fmul_rn(__fdiv_rn(grad[i], *divisor), *clip);
  float p = values[i];
  float m = __fadd_rn(__fmul_rn(b1, exp_avg[i]), __fmul_rn(rest1, g));
  float v = __fadd_rn(__fmul_rn(b2, exp_avg_sq[i]), __fmul_rn(rest2, __fmul_rn(g, g)));
  float step = __fdiv_rn(m, __fmul_rn(*first, __fadd_rn(__fdiv_rn(__fsqrt_rn(v), *second), eps)));
  if (decay != 0.f) {
    float by = decay_scale ? __fmul_rn(decay, decay_scale[i]) : decay;
    step = __fadd_rn(step, __fmul_rn(by, p));
  }
  float rate = lr_scale ? __fmul_rn(*lr, lr_scale[i]) : *lr;
  p = __fsub_rn(p, __fmul_rn(rate, step));
  values[i] = p;
  exp_avg[i] = m;
  exp_avg_sq[i] = v;
  if (low) low[i] = from_float<T>(p);
}

// mean -= rate * (mean - values)
extern "C" __global__ void average(float* mean, const float* values, const float* rate, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= n) return;
  mean[i] = __fsub_rn(mean[i], __fmul_rn(*rate, __fsub_rn(mean[i], values[i])));
}
