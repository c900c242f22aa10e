// DoRA's factors from products of the size of the low-rank matrices: one thread for each norm.
//
// Contract: arrays are dense. Element (rank r, norm j, tap t) of crossed, own and squared is at
// r * rank_stride + j * norm_stride + t. Sums are fp32, in the order of ranks and taps.
#pragma once

// gain[j] = magnitude[j] / norm[j] - 1, norm[j]^2 = squares[j] + sum crossed * (2 scale own + scale^2 squared).
extern "C" __global__ void __launch_bounds__(128)
    dora_gain(const float* magnitude, const float* squares, const T* crossed, const T* own, const T* squared,
              float* gain, float* norm, const int n, const int rank, const int taps, const long long rank_stride,
              const long long norm_stride, const float scale) {
  const int j = blockIdx.x * 128 + threadIdx.x;
  if (j >= n) return;
  constexpr float SMALLEST = 1.1920928955078125e-07f;
  float sum = 0.0f;
#pragma unroll 4
  for (int r = 0; r < rank; r++) {
    const long long begin = r * rank_stride + j * norm_stride;
    for (int t = 0; t < taps; t++) {
      const float both = 2.0f * scale * to_float(own[begin + t]) + scale * scale * to_float(squared[begin + t]);
      sum += to_float(crossed[begin + t]) * both;
    }
  }
  norm[j] = sqrtf(fmaxf(squares[j] + sum, SMALLEST * SMALLEST));
  gain[j] = magnitude[j] / norm[j] - 1.0f;
}
