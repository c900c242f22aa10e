// Columns of 8-bit numbers as rows, whatever format their bytes are of.
//
// Contract: operands are dense and 16-byte aligned.
#pragma once

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
