// Scales of rows as cuBLASLt reads those of blocks (CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0): tiles of 128 rows by 4 blocks,
// one after another along a row of tiles. In a tile the byte of row r and block b is r % 32 * 16 + r / 32 * 4 + b.
//
// Contract: factors are powers of two from 2^-126 to 2^127, or NaN, which stays NaN. All blocks of a row have its factor; rows
// beyond the last have 1.
#pragma once

// A thread writes a row's four blocks of a tile. grid (words / 256)
extern "C" __global__ void __launch_bounds__(256)
    spread(const unsigned* __restrict__ factors, unsigned* __restrict__ scales, const int rows, const int across, const int words) {
  const int word = blockIdx.x * 256 + threadIdx.x, row = word / 128 / across * 128 + word % 4 * 32 + word % 128 / 4;
  if (word < words) scales[word] = (row < rows ? factors[row] >> 23 : 127u) * 0x01010101u;  // the exponent is UE8M0's
}
