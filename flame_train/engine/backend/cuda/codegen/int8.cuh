// Whole numbers of 8 bits, -127 to 127, with a factor for each row; see int8.py.
//
// Contract: rounds to nearest, ties to even, what lies beyond to the end. NaN becomes anything: its row's factor says so.
#pragma once

struct int8 { signed char value; };

// What a row's numbers are multiplied by when they are read, and when they are stored, by their largest magnitude.
__device__ __forceinline__ float int8_factor(float largest) {
  return largest < INFINITE ? fmaxf(largest, 7.8886090522101181e-31f) / 127.f : __int_as_float(0x7fc00000);
}
__device__ __forceinline__ float int8_inverse(float largest) { return 127.f / fmaxf(largest, 7.8886090522101181e-31f); }

__device__ __forceinline__ float to_float(int8 x) { return (float)x.value; }
__device__ __forceinline__ void from_float(float x, int8& y) {
  y.value = (signed char)(int)fminf(fmaxf(rintf(x), -127.f), 127.f);
}
