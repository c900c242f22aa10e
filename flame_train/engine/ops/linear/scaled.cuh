// Columns of 8-bit numbers as rows, whatever format their bytes are of.
//
// Contract: operands are dense and 16-byte aligned.
#pragma once

// y (width, rows), x's columns: by tiles of 64 x 64. Both sizes are multiples of 16. grid (tiles across, tiles down)
//
// A thread turns 4 x 4 bytes in registers, so that shared memory holds and moves words of four bytes.
extern "C" __global__ void __launch_bounds__(256) turn(
    const unsigned char* __restrict__ x, unsigned char* __restrict__ y, const int rows, const int width) {
  typedef Packet<unsigned, 4> Line;
  __shared__ unsigned tile[64][17];  // a column, four of its bytes a word
  const int first = blockIdx.y * 64, across = blockIdx.x * 64;
  const int down = threadIdx.x / 16, right = threadIdx.x % 16;
  if (first + 4 * down < rows && across + 4 * right < width) {
    unsigned in[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      in[i] = *reinterpret_cast<const unsigned*>(x + (long long)(first + 4 * down + i) * width + across + 4 * right);
    // pairs of rows: bytes 0 and 1 of each, then bytes 2 and 3
    const unsigned low01 = __byte_perm(in[0], in[1], 0x5140), low23 = __byte_perm(in[2], in[3], 0x5140);
    const unsigned high01 = __byte_perm(in[0], in[1], 0x7362), high23 = __byte_perm(in[2], in[3], 0x7362);
    tile[4 * right][down] = __byte_perm(low01, low23, 0x5410);
    tile[4 * right + 1][down] = __byte_perm(low01, low23, 0x7632);
    tile[4 * right + 2][down] = __byte_perm(high01, high23, 0x5410);
    tile[4 * right + 3][down] = __byte_perm(high01, high23, 0x7632);
  }
  __syncthreads();
  const int column = threadIdx.x / 4, part = threadIdx.x % 4;
  if (across + column >= width || first + 16 * part >= rows) return;
  Line q;
#pragma unroll
  for (int i = 0; i < 4; i++) q.e[i] = tile[column][4 * part + i];
  *reinterpret_cast<Line*>(y + (long long)(across + column) * rows + first + 16 * part) = q;
}
