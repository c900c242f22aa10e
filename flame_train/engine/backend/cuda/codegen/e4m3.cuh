// Numbers of 8 bits, e4m3: up to 448, with a power of two for each row; see e4m3.py.
//
// Contract: inputs are at most 448 and rounds to nearest, ties to even. NaN becomes anything: its
// row's factor says so.
#pragma once

struct e4m3 { unsigned char bits; };

// The power of two that brings `largest` to at most 448 = 0.875 * 2^9; no number where that is none.
__device__ __forceinline__ float factor_of(float largest) {
  if (!(largest < INFINITE)) return __int_as_float(0x7fc00000);
  const int bits = __float_as_int(largest), exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7fffff) > 0x600000);
  return __int_as_float((largest > 0.f ? max(-100, min(100, exponent)) + 127 : 127) << 23);
}

__device__ __forceinline__ float to_float(e4m3 x) {
#ifdef OF_E4M3
  float f;
  OF_E4M3(x.bits, f);
  return f;
#else
  const int binade = (x.bits >> 3) & 15, bits = (binade + 120) << 23 | (x.bits & 7) << 20;
  const float f = binade ? __int_as_float(bits) : (x.bits & 7) * 0.001953125f;
  return x.bits & 128 ? -f : f;
#endif
}
__device__ __forceinline__ void from_float(float x, e4m3& y) {
  const int bits = __float_as_int(x), binade = max(((bits >> 23) & 0xff) - 127, -6);
  const int steps = (int)rintf(fabsf(x) * __int_as_float((127 + 3 - binade) << 23));
  y.bits = min((binade + 6) * 8 + steps, 126) | (bits < 0 ? 128 : 0);
}
__device__ __forceinline__ void from_two(float a, float b, e4m3* y) {
#ifdef E4M3_OF_TWO
  E4M3_OF_TWO(a, b, y);
#else
  from_float(a, y[0]);
  from_float(b, y[1]);
#endif
}
