// Rows in e4m3 with a power of two each, as e4m3.py says; to them, back, and columns for rows.
//
// Contract: operands are dense but for the rows of what is encoded, `distance` elements apart; WIDTH divides `width` and
// packets of WIDTH elements are aligned. Factors are the bits of a float. No sums, so no order matters.
#pragma once

typedef unsigned char Code;

// The power of two that brings `largest` to at most 448 = 0.875 * 2^9; no number where that is none.
__device__ __forceinline__ float factor_of(float largest) {
  if (!(largest < INFINITE)) return __int_as_float(0x7fc00000);
  const int bits = __float_as_int(largest), exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7fffff) > 0x600000);
  return __int_as_float((largest > 0.f ? max(-100, min(100, exponent)) + 127 : 127) << 23);
}

// Of at most 448, rounded to nearest, ties to even.
__device__ __forceinline__ Code code_of(float x) {
  const int bits = __float_as_int(x), binade = max(((bits >> 23) & 0xff) - 127, -6);
  const int steps = (int)rintf(fabsf(x) * __int_as_float((127 + 3 - binade) << 23));
  return min((binade + 6) * 8 + steps, 126) | (bits < 0 ? 128 : 0);
}
__device__ __forceinline__ void codes_of(float a, float b, Code* to) {
#ifdef CODES_OF_TWO
  CODES_OF_TWO(a, b, to);
#else
  to[0] = code_of(a), to[1] = code_of(b);
#endif
}
__device__ __forceinline__ float number_of(Code c) {
  const int binade = (c >> 3) & 15, bits = (binade + 120) << 23 | (c & 7) << 20;
  const float x = binade ? __int_as_float(bits) : (c & 7) * 0.001953125f;
  return c & 128 ? -x : x;
}

// THREADS, a warp or the block, take a row: once for its largest number, once to encode it. With BY each column is first
// multiplied by a factor of its own. grid (rows * THREADS / 256)
extern "C" __global__ void __launch_bounds__(256) encode(
    const T* __restrict__ x, const unsigned* __restrict__ by, Code* __restrict__ codes, unsigned* __restrict__ scales,
    const int rows, const int width, const long long distance) {
  __shared__ float shared[32];
  const int row = blockIdx.x * (256 / THREADS) + threadIdx.x / THREADS, lane = threadIdx.x % THREADS;
  if (row >= rows) return;
  const float* columns = reinterpret_cast<const float*>(by);
  const T* from = x + row * distance;
  float largest = 0.f;
  for (int c = lane * WIDTH; c < width; c += THREADS * WIDTH) {
    const Packet<T, WIDTH> q = *reinterpret_cast<const Packet<T, WIDTH>*>(from + c);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) largest = larger(fabsf(to_float(q.e[i]) * (BY ? columns[c + i] : 1.f)), largest);
  }
  const float factor = factor_of(of_all<Max, THREADS>(largest, shared)), inverse = 1.f / factor;
  if (lane == 0) scales[row] = __float_as_uint(factor);
  for (int c = lane * WIDTH; c < width; c += THREADS * WIDTH) {
    const Packet<T, WIDTH> q = *reinterpret_cast<const Packet<T, WIDTH>*>(from + c);
    Packet<Code, WIDTH> made;
    float f[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) f[i] = to_float(q.e[i]) * (BY ? columns[c + i] : 1.f) * inverse;
    if (WIDTH == 1) {
      made.e[0] = code_of(f[0]);
    } else {
#pragma unroll
      for (int i = 0; i + 1 < WIDTH; i += 2) codes_of(f[i], f[i + 1], made.e + i);
    }
    *reinterpret_cast<Packet<Code, WIDTH>*>(codes + (long long)row * width + c) = made;
  }
}

// A thread a packet; `along` packets are a row.
extern "C" __global__ void __launch_bounds__(256) decode(
    const Code* __restrict__ codes, const unsigned* __restrict__ scales, T* __restrict__ y, const unsigned packets,
    const unsigned along, const unsigned along_magic, const unsigned along_shift) {
  const unsigned p = blockIdx.x * 256 + threadIdx.x;
  if (p >= packets) return;
  const float factor = __uint_as_float(scales[Divisor{along, along_magic, along_shift}.quotient(p)]);
  const Packet<Code, WIDTH> q = *reinterpret_cast<const Packet<Code, WIDTH>*>(codes + (long long)p * WIDTH);
  float f[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) f[i] = number_of(q.e[i]) * factor;
  store<T, WIDTH>(y + (long long)p * WIDTH, f);
}

// y (width, rows), x's columns: by tiles of 64 x 64. Both sizes are multiples of 16. grid (tiles across, tiles down)
extern "C" __global__ void __launch_bounds__(256) turn(
    const Code* __restrict__ x, Code* __restrict__ y, const int rows, const int width) {
  typedef Packet<Code, 16> Line;
  __shared__ Code tile[64][68];
  const int first = blockIdx.y * 64, across = blockIdx.x * 64, r = threadIdx.x / 4, c = threadIdx.x % 4 * 16;
  if (first + r < rows && across + c < width) {
    const Line q = *reinterpret_cast<const Line*>(x + (long long)(first + r) * width + across + c);
#pragma unroll
    for (int i = 0; i < 16; i++) tile[c + i][r] = q.e[i];
  }
  __syncthreads();
  if (across + r >= width || first + c >= rows) return;
  Line q;
#pragma unroll
  for (int i = 0; i < 16; i++) q.e[i] = tile[r][c + i];
  *reinterpret_cast<Line*>(y + (long long)(across + r) * rows + first + c) = q;
}
