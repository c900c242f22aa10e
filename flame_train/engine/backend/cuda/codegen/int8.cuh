// Whole numbers of 8 bits, -127 to 127, with a factor for each row; see int8.py.
//
// Contract: inputs are at most 127, and round to nearest, ties to even. NaN becomes anything: its row's factor says so.
#pragma once

struct int8 { signed char value; };

// What a row's numbers are multiplied by when they are read, and when they are stored, by their largest magnitude.
__device__ __forceinline__ float int8_factor(float largest) {
  return largest < INFINITE ? fmaxf(largest, 7.8886090522101181e-31f) / 127.f : __int_as_float(0x7fc00000);
}
__device__ __forceinline__ float int8_inverse(float largest) { return 127.f / fmaxf(largest, 7.8886090522101181e-31f); }

__device__ __forceinline__ float to_float(int8 x) { return (float)x.value; }
__device__ __forceinline__ void from_float(float x, int8& y) {
  y.value = (signed char)__float_as_int(__fadd_rn(x, 12582912.f));  // 1.5 * 2^23: the lowest bit is the unit
}
