// Rows of e4m3 given back, and columns for rows.
//
// Contract: operands are dense; WIDTH divides a row's length and packets of WIDTH elements are aligned. Factors are the
// bits of a float.
#pragma once

constexpr int AHEAD = 4;

// A thread AHEAD packets, all asked for before the first is written; `along` packets are a row.
extern "C" __global__ void __launch_bounds__(256) decode(
    const e4m3* __restrict__ codes, const unsigned* __restrict__ scales, T* __restrict__ y, const unsigned packets,
    const unsigned along, const unsigned along_magic, const unsigned along_shift) {
  typedef Packet<e4m3, WIDTH> Codes;
  const Divisor by_along{along, along_magic, along_shift};
  const unsigned first = blockIdx.x * (256 * AHEAD) + threadIdx.x;
  Codes q[AHEAD];
  float factor[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++) {
    const unsigned p = first + j * 256;
    if (p >= packets) break;
    q[j] = *reinterpret_cast<const Codes*>(codes + (long long)p * WIDTH);
    factor[j] = __uint_as_float(scales[by_along.quotient(p)]);
  }
#pragma unroll
  for (int j = 0; j < AHEAD; j++) {
    const unsigned p = first + j * 256;
    if (p >= packets) break;
    float f[WIDTH];
    if (WIDTH == 1) {
      f[0] = to_float(q[j].e[0]);
    } else {
#pragma unroll
      for (int i = 0; i + 1 < WIDTH; i += 2) to_two(q[j].e + i, f[i], f[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) f[i] *= factor[j];
    store<T, WIDTH>(y + (long long)p * WIDTH, f);
  }
}

// y (width, rows), x's columns: by tiles of 64 x 64. Both sizes are multiples of 16. grid (tiles across, tiles down)
extern "C" __global__ void __launch_bounds__(256) turn(
    const e4m3* __restrict__ x, e4m3* __restrict__ y, const int rows, const int width) {
  typedef Packet<e4m3, 16> Line;
  __shared__ e4m3 tile[64][68];
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
