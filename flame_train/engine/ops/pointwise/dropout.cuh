// Dropout: elements times 0 or a factor, as the random words of philox.cuh say. The gradient is the same of another array.
//
// Contract: x, addend and y are dense (samples, count), and 16-byte aligned where WIDTH is above 1. WIDTH divides count
// and GROUP. addend may be null; y may be x or addend. Element i of a sample has word i of that sample, as engine/random.py
// draws them, and is kept if that is at least `limit`. The step is at `step` or, where that is null, `host_step`.
// Arithmetic is fp32.
#pragma once
#include "philox.cuh"

constexpr int GROUP = 16 / sizeof(T);  // elements to a thread: one or two blocks of four words

extern "C" __global__ void __launch_bounds__(256) dropout(
    const T* x, const A* addend, A* y, const long long* samples, const long long* step, const long long host_step,
    const unsigned stream, const Keys keys, const unsigned limit, const float factor, const long long count,
    const unsigned by_groups, const unsigned magic_groups, const unsigned shift_groups, const unsigned total) {
  const unsigned thread = blockIdx.x * 256u + threadIdx.x;
  if (thread >= total) return;
  const Divisor groups = {by_groups, magic_groups, shift_groups};
  const unsigned sample = groups.quotient(thread), group = groups.rest(thread);
  const long long first = sample * count + group * (long long)GROUP, left = count - group * (long long)GROUP;
  Packet<T, WIDTH> in[GROUP / WIDTH];
  Packet<A, WIDTH> more[GROUP / WIDTH];
#pragma unroll
  for (int k = 0; k < GROUP / WIDTH; k++)
    if (k * WIDTH < left) {
      in[k] = *reinterpret_cast<const Packet<T, WIDTH>*>(x + first + k * WIDTH);
      if (addend) more[k] = *reinterpret_cast<const Packet<A, WIDTH>*>(addend + first + k * WIDTH);
    }
  const unsigned at = (unsigned)(step ? *step : host_step), which = (unsigned)samples[sample];
  float by[GROUP];
#pragma unroll
  for (int b = 0; b < GROUP / 4; b++) {
    const uint4 words = philox(group * (GROUP / 4) + b, at, which, stream, keys);
    by[4 * b] = words.x >= limit ? factor : 0.f;
    by[4 * b + 1] = words.y >= limit ? factor : 0.f;
    by[4 * b + 2] = words.z >= limit ? factor : 0.f;
    by[4 * b + 3] = words.w >= limit ? factor : 0.f;
  }
#pragma unroll
  for (int k = 0; k < GROUP / WIDTH; k++) {
    if (k * WIDTH >= left) break;
    float made[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      made[i] = to_float(in[k].e[i]) * by[k * WIDTH + i];
      if (addend) made[i] += to_float(more[k].e[i]);
    }
    store<A, WIDTH>(y + first + k * WIDTH, made);
  }
}
