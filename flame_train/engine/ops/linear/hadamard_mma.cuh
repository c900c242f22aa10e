// hadamard.cuh's kernels for 16 bits, by products of warps, m16 n8 k16 (compute capability 8.0), and the gradients of
// the thin factors themselves. Neither the products nor their gradients go to memory: each pass makes them again.
//
// Contract: arrays are dense; weight, dW and out (rows, width), first_a and second_a (rows, rank), first_b and second_b
// (rank, width), rank at most 16 CHUNKS. N is 8 where `width` is a multiple of 8 and arrays begin at multiples of 16
// bytes, else 1. EVEN: whether rank is even and arrays begin at multiples of 4 bytes. Sums are fp32, in an order that
// shapes and the grid give: equal inputs give equal bits.
//
// A lane is 4 g + t. Of a product a thread has columns 2 t and 2 t + 1 of rows g and g + 8. Which column of the weight
// a column of a product stands for is ours to choose: so that a thread's are packets of eight.
#pragma once

typedef unsigned u32;

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16, COLUMNS = 64;  // of a tile, a warp's
constexpr int RANKS = 16 * CHUNKS;
constexpr int BLOCKS = N == 8 && CHUNKS == 1 ? 3 : 2;  // of gradients, that a multiprocessor has registers for
constexpr int PITCH = COLUMNS + 4;  // of sums in shared memory: lanes that write together meet fewer banks twice

struct Factors {
  const T *a[2], *b[2];
  int rows, width, rank;
};

// c += a b, of 16 x 16 and 16 x 8.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b, u32 b2, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b, u32 b2, fp16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b2));
}

__device__ __forceinline__ int group() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int member() { return threadIdx.x % 4; }
__device__ __forceinline__ int warp_of_block() { return threadIdx.x / 32; }

// Two neighbours, zeros where fewer are `left`.
__device__ __forceinline__ u32 two(const T* from, int left) {
  return (left > 0 ? (u32)from[0].bits : 0u) | (left > 1 ? (u32)from[1].bits << 16 : 0u);
}
// The same of a row of first_a or second_a, from an even place on.
__device__ __forceinline__ u32 two_ranks(const T* from, int left) {
  if (!EVEN) return two(from, left);
  return left > 0 ? *reinterpret_cast<const u32*>(from) : 0u;
}
__device__ __forceinline__ void eight(u32 (&x)[4], const T* from, int left) {
  if (N == 8) {
    const uint4 q = left > 0 ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = two(from + 2 * i, left - 2 * i);
  }
}
// Eight columns from `column` on of a row of `count`.
__device__ __forceinline__ void eight(u32 (&x)[4], const T* from, int row, int count, int column, int width) {
  eight(x, from + (long long)row * width + column, row < count ? width - column : 0);
}
__device__ __forceinline__ float value(const u32 (&x)[4], int i) {
  T made;
  made.bits = (unsigned short)(x[i / 2] >> i % 2 * 16);
  return to_float(made);
}
// Element i of each of two packets.
__device__ __forceinline__ u32 across(const u32 (&x)[4], const u32 (&y)[4], int i) {
  return __byte_perm(x[i / 2], y[i / 2], i % 2 ? 0x7632 : 0x5410);
}
__device__ __forceinline__ u32 packed(float x, float y) {
  u32 made;
  from_two(x, y, reinterpret_cast<T*>(&made));
  return made;
}
// Eight elements to memory, as far as they are `left`.
__device__ __forceinline__ void leave(T* to, const float (&f)[8], int left) {
  if (N == 8) {
    if (left > 0) store<T, 8>(to, f);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < left) from_float(f[i], to[i]);
  }
}

// ---- row by row ---------------------------------------------------------------------------------------------------

// A tile of the weight: the thread's rows are g + 8 h, its packets t + 4 p, as sums 2 h + p of products have them.
struct Rowwise {
  u32 at[2][2][4];
  __device__ __forceinline__ Rowwise(const T* from, int row, int rows, int column, int width) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      eight(at[i / 2][i % 2], from, row + group() + i / 2 * 8, rows, column + (member() + i % 2 * 4) * 8, width);
  }
};

// The tile of both products: made[m][j] has element j of each packet.
__device__ __forceinline__ void products(float (&made)[2][8][4], const Factors& f, int row, int column) {
  const int g = group(), t = member(), own = column + (g / 2 + g % 2 * 4) * 8;
#pragma unroll
  for (int i = 0; i < 64; i++) made[i / 32][i / 4 % 8][i % 4] = 0.f;
#pragma unroll 1
  for (int first = 0; first < RANKS; first += 16)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 left[4], right[4][4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = row + g + e % 2 * 8, k = first + 2 * t + e / 2 * 8;
        left[e] = two_ranks(f.a[m] + (long long)r * f.rank + k, r < f.rows ? f.rank - k : 0);
        eight(right[e], f.b[m], first + 2 * t + e / 2 * 8 + e % 2, f.rank, own, f.width);
      }
#pragma unroll
      for (int j = 0; j < 8; j++)
        multiply(made[m][j], left, across(right[0], right[1], j), across(right[2], right[3], j), T());
    }
}

// out = weight + scale * (first_a @ first_b) * (second_a @ second_b). Grid: (tiles of the width, of the rows by WARPS).
extern "C" __global__ void __launch_bounds__(128)
    hadamard_add(const T* __restrict__ weight, const T* __restrict__ first_a, const T* __restrict__ first_b,
                 const T* __restrict__ second_a, const T* __restrict__ second_b, T* __restrict__ out, const int rows,
                 const int width, const int rank, const float scale) {
  const Factors f = {{first_a, second_a}, {first_b, second_b}, rows, width, rank};
  const int row = (blockIdx.y * WARPS + warp_of_block()) * ROWS, column = blockIdx.x * COLUMNS;
  if (row >= rows) return;
  const Rowwise w(weight, row, rows, column, width);
  float made[2][8][4];
  products(made, f, row, column);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = row + group() + i / 2 * 8, c = column + (member() + i % 2 * 4) * 8;
    float sum[8];
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] = value(w.at[i / 2][i % 2], j) + scale * made[0][j][i] * made[1][j][i];
    if (r < rows) leave(out + (long long)r * width + c, sum, width - c);
  }
}

// of_products (2, rows, width): as in hadamard.cuh, for ranks whose products are not to be made twice. Grid: the same.
extern "C" __global__ void __launch_bounds__(128)
    hadamard_gradients(const T* __restrict__ grad, const T* __restrict__ first_a, const T* __restrict__ first_b,
                       const T* __restrict__ second_a, const T* __restrict__ second_b, T* __restrict__ of_products,
                       const int rows, const int width, const int rank, const float scale) {
  const Factors f = {{first_a, second_a}, {first_b, second_b}, rows, width, rank};
  const int row = (blockIdx.y * WARPS + warp_of_block()) * ROWS, column = blockIdx.x * COLUMNS;
  if (row >= rows) return;
  const Rowwise w(grad, row, rows, column, width);
  float made[2][8][4];
  products(made, f, row, column);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int m = i / 4, r = row + group() + i % 4 / 2 * 8, c = column + (member() + i % 2 * 4) * 8;
    float of[8];
#pragma unroll
    for (int j = 0; j < 8; j++) of[j] = scale * value(w.at[i % 4 / 2][i % 2], j) * made[1 - m][j][i % 4];
    if (r < rows) leave(of_products + ((long long)m * rows + r) * width + c, of, width - c);
  }
}

// parts (gridDim.y, 2, 64 gridDim.x, RANKS): what `tiles` tiles of the width make of the gradients of first_a and
// second_a. Grid: (tiles of the rows by WARPS, parts, CHUNKS), a block for 16 of the rank. A product's 16 columns are
// packets' halves.
extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    hadamard_of_a(const T* __restrict__ grad, const T* __restrict__ first_a, const T* __restrict__ first_b,
                  const T* __restrict__ second_a, const T* __restrict__ second_b, float* __restrict__ parts,
                  const int rows, const int width, const int rank, const int tiles, const float scale) {
  const Factors f = {{first_a, second_a}, {first_b, second_b}, rows, width, rank};
  const int g = group(), t = member(), row = (blockIdx.x * WARPS + warp_of_block()) * ROWS, first = blockIdx.z * 16;
  const int begin = blockIdx.y * tiles * COLUMNS, end = min(width, begin + tiles * COLUMNS);
  float sums[2][2][4];
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.f;
  for (int column = begin; column < end; column += COLUMNS) {
    const Rowwise w(grad, row, rows, column, width);
    float made[2][8][4];
    products(made, f, row, column);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int m = i / 2, p = i % 2;
      u32 right[2][4];
#pragma unroll
      for (int n = 0; n < 2; n++)
        eight(right[n], f.b[m], first + g / 2 * 4 + n * 2 + g % 2, rank, column + (t + p * 4) * 8, width);
#pragma unroll
      for (int s = 0; s < 2; s++) {
        u32 left[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int h = e % 2, j = 4 * s + e / 2 * 2, at = 2 * h + p;
          left[e] = packed(scale * value(w.at[h][p], j) * made[1 - m][j][at],
                           scale * value(w.at[h][p], j + 1) * made[1 - m][j + 1][at]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) multiply(sums[m][n], left, right[n][2 * s], right[n][2 * s + 1], T());
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int m = i / 2, h = i % 2 * 2;
    const float of[4] = {sums[m][0][h], sums[m][0][h + 1], sums[m][1][h], sums[m][1][h + 1]};
    const long long r = (blockIdx.y * 2ll + m) * gridDim.x * (WARPS * ROWS) + row + g + 4 * h;
    store<float, 4>(parts + r * RANKS + first + 4 * t, of);
  }
}

// ---- column by column ---------------------------------------------------------------------------------------------

// Of both products' transposes columns `two` and two + 1 of each half of packets that begin at `own`, 16 rows:
// made[m][j][n] has rows 8 n on.
__device__ __forceinline__ void turned(float (&made)[2][2][2][4], const Factors& f, int row, int own, int two) {
  const int g = group(), t = member();
#pragma unroll
  for (int i = 0; i < 32; i++) made[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0.f;
#pragma unroll 1
  for (int first = 0; first < RANKS; first += 16)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      u32 b[4][4], a[2][2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = row + g + i / 2 * 8, k = first + 2 * t + i % 2 * 8;
        eight(b[i], f.b[m], first + 2 * t + i / 2 * 8 + i % 2, f.rank, own, f.width);
        a[i / 2][i % 2] = two_ranks(f.a[m] + (long long)r * f.rank + k, r < f.rows ? f.rank - k : 0);
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 left[4];
#pragma unroll
        for (int e = 0; e < 4; e++) left[e] = across(b[e / 2 * 2], b[e / 2 * 2 + 1], two + j + e % 2 * 4);
#pragma unroll
        for (int n = 0; n < 2; n++) multiply(made[m][j][n], left, a[n][0], a[n][1], T());
      }
    }
}

// Sixteen rows of first_a or second_a as a right operand, 16 of the rank from `first` on: right[n] has 2 g + n.
__device__ __forceinline__ void rows_of(u32 (&right)[2][2], const T* a, const Factors& f, int row, int first) {
  u32 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = row + 2 * member() + i / 2 * 8 + i % 2, k = first + 2 * group();
    x[i] = two_ranks(a + (long long)r * f.rank + k, r < f.rows ? f.rank - k : 0);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    right[i / 2][i % 2] = __byte_perm(x[i % 2 * 2], x[i % 2 * 2 + 1], i / 2 ? 0x7632 : 0x5410);
}

// What the block's warps have summed, added up and left in its place of `parts`.
__device__ __forceinline__ void leave_total(float* parts, const float (&sums)[2][4][2][4]) {
  __shared__ __align__(16) float shared[WARPS][32 * PITCH];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int m = i / 8, n = i / 4 % 2, e = i % 4, r = m * 16 + 4 * member() + n + e % 2 * 2;
    const float of[4] = {sums[m][0][n][e], sums[m][1][n][e], sums[m][2][n][e], sums[m][3][n][e]};
    store<float, 4>(shared[warp_of_block()] + r * PITCH + group() * 8 + e / 2 * 4, of);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * COLUMNS / 4; i += THREADS) {
    const int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
    float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int e = 0; e < 4 * WARPS; e++) total[e % 4] += shared[e / 4][r * PITCH + c + e % 4];
    const long long to = (blockIdx.y * 2ll + r / 16) * RANKS + blockIdx.z * 16 + r % 16;
    store<float, 4>(parts + (to * gridDim.x + blockIdx.x) * COLUMNS + c, total);
  }
}

// parts (gridDim.y, 2, RANKS, 64 gridDim.x): what `steps` times 64 rows make of the gradients of first_b and second_b,
// whose transposes are made. A thread has packet g of rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Warps take turns at rows.
// Grid: (tiles of the width, parts, CHUNKS), a block for 16 of the rank.
extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    hadamard_of_b(const T* __restrict__ grad, const T* __restrict__ first_a, const T* __restrict__ first_b,
                  const T* __restrict__ second_a, const T* __restrict__ second_b, float* __restrict__ parts,
                  const int rows, const int width, const int rank, const int steps, const float scale) {
  const Factors f = {{first_a, second_a}, {first_b, second_b}, rows, width, rank};
  const int own = blockIdx.x * COLUMNS + group() * 8, begin = blockIdx.y * steps * WARPS * ROWS;
  const int end = min(rows, begin + steps * WARPS * ROWS);
  float sums[2][4][2][4];
#pragma unroll
  for (int i = 0; i < 64; i++) sums[i / 32][i / 8 % 4][i / 4 % 2][i % 4] = 0.f;
  for (int row = begin + warp_of_block() * ROWS; row < end; row += WARPS * ROWS) {
    u32 w[4][4], right[2][2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) eight(w[i], grad, row + 2 * member() + i / 2 * 8 + i % 2, rows, own, width);
#pragma unroll
    for (int m = 0; m < 2; m++) rows_of(right[m], f.a[m], f, row, blockIdx.z * 16);
#pragma unroll
    for (int two = 0; two < 4; two += 2) {
      float made[2][2][2][4];
      turned(made, f, row, own, two);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int m = i / 2, j = i % 2;
        u32 left[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int h = e / 2, at = e % 2 * 2, c = two + j + e % 2 * 4;
          left[e] = packed(scale * value(w[2 * h], c) * made[1 - m][j][h][at],
                           scale * value(w[2 * h + 1], c) * made[1 - m][j][h][at + 1]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) multiply(sums[m][two + j][n], left, right[m][n][0], right[m][n][1], T());
      }
    }
  }
  leave_total(parts, sums);
}

// ---- of all parts -------------------------------------------------------------------------------------------------

// The gradients of first_a, second_a, first_b and second_b, one for each blockIdx.y: sums of count_a or count_b parts.
// A part of the former has long_a rows, one of the latter long_b columns. Bit blockIdx.y of `adds` says whether to add
// to what is there. A gradient that nobody wants is null. Grid: (blocks of THREADS elements of the longest, 4).
extern "C" __global__ void __launch_bounds__(128)
    hadamard_totals(const float* __restrict__ of_a, const float* __restrict__ of_b, float* first_a, float* second_a,
                    float* first_b, float* second_b, const int rows, const int width, const int rank, const int count_a,
                    const int count_b, const int long_a, const int long_b, const int adds) {
  const int which = blockIdx.y, m = which % 2, i = blockIdx.x * THREADS + threadIdx.x;
  float* to = which < 2 ? (m ? second_a : first_a) : m ? second_b : first_b;
  if (!to || i >= (which < 2 ? rows : width) * rank) return;
  const int length = which < 2 ? long_a : long_b, count = which < 2 ? count_a : count_b;
  const long long each = (long long)length * RANKS;
  const float* from = which < 2 ? of_a + (long long)(i / rank) * RANKS + i % rank
                                : of_b + (long long)(i / width) * length + i % width;
  float total = 0.f;
#pragma unroll 4
  for (int p = 0; p < count; p++) total += from[(2 * p + m) * each];
  to[i] = adds >> which & 1 ? to[i] + total : total;
}
