// A weight with the elementwise product of two thin products added (LoHa), or that product's gradients before the thin
// products: both need first_a @ first_b and second_a @ second_b of a tile, which a block computes and does not store.
//
// Contract: arrays are dense; weight, dW and out (rows, width), first_a and second_a (rows, rank), first_b and second_b
// (rank, width). A packet is N elements of T, `width` a multiple of it, and arrays begin at multiples of 16 bytes.
// Products are summed in fp32 in the order of the rank. Grid: (tiles of the width, tiles of the rows).
#pragma once

constexpr int ROWS = 64, COLUMNS = 128, CHUNK = 16, THREADS = 256;
constexpr int ROWS_EACH = 4, PACKETS = 8 / N;  // of a thread: four rows, eight columns
constexpr int ACROSS = COLUMNS / 8;            // threads along a row
constexpr int PITCH = ROWS + 4;                // lanes that write a column together meet different banks

struct alignas(16) Tile {
  float a[2][CHUNK][PITCH];
  float b[2][CHUNK][COLUMNS];
};

// The first column of the thread's packet p. Neighbouring threads have neighbouring packets.
__device__ __forceinline__ int column_of(int p) { return (p * ACROSS + threadIdx.x % ACROSS) * N; }

__device__ __forceinline__ void load(const T* from, float* f) {
  const Packet<T, N> q = *reinterpret_cast<const Packet<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; i++) f[i] = to_float(q.e[i]);
}

// A chunk of the rank of all four matrices to shared memory; zeros beyond their ends.
__device__ __forceinline__ void fetch(
    Tile& tile, const T* const (&a)[2], const T* const (&b)[2], int row, int column, int first, int rows, int width,
    int rank
) {
#pragma unroll
  for (int m = 0; m < 2; m++) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * CHUNK; i += THREADS) {
      const int r = i % CHUNK, here = i / CHUNK;
      const bool inside = row + here < rows && first + r < rank;
      tile.a[m][r][here] = inside ? to_float(a[m][(long long)(row + here) * rank + first + r]) : 0.0f;
    }
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * COLUMNS / N; i += THREADS) {
      const int r = i / (COLUMNS / N), here = i % (COLUMNS / N) * N;
      float f[N] = {};
      if (column + here < width && first + r < rank) load(b[m] + (long long)(first + r) * width + column + here, f);
      store<float, N>(tile.b[m][r] + here, f);
    }
  }
}

// The thread's elements of both products, row by row.
__device__ __forceinline__ void products(
    Tile& tile, float (&made)[2][ROWS_EACH][8], const T* first_a, const T* first_b, const T* second_a, const T* second_b,
    int rows, int width, int rank
) {
  const T* const a[2] = {first_a, second_a};
  const T* const b[2] = {first_b, second_b};
  const int row = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS, own = threadIdx.x / ACROSS * ROWS_EACH;
#pragma unroll
  for (int i = 0; i < 2 * ROWS_EACH * 8; i++) made[i / (ROWS_EACH * 8)][i / 8 % ROWS_EACH][i % 8] = 0.0f;
  for (int first = 0; first < rank; first += CHUNK) {
    if (first) __syncthreads();
    fetch(tile, a, b, row, column, first, rows, width, rank);
    __syncthreads();
    const int count = min(CHUNK, rank - first);
    for (int r = 0; r < count; r++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const Packet<float, ROWS_EACH> left = *reinterpret_cast<const Packet<float, ROWS_EACH>*>(tile.a[m][r] + own);
#pragma unroll
        for (int p = 0; p < PACKETS; p++) {
          const Packet<float, N> right = *reinterpret_cast<const Packet<float, N>*>(tile.b[m][r] + column_of(p));
#pragma unroll
          for (int i = 0; i < ROWS_EACH * N; i++) made[m][i / N][p * N + i % N] += left.e[i / N] * right.e[i % N];
        }
      }
  }
}

// Goes through the thread's packets: `use(place, m1, m2)` with the place in the weight and both products' elements.
template <class Use> __device__ __forceinline__ void each_packet(float (&made)[2][ROWS_EACH][8], int rows, int width, Use use) {
  const int row = blockIdx.y * ROWS + threadIdx.x / ACROSS * ROWS_EACH, column = blockIdx.x * COLUMNS;
#pragma unroll
  for (int i = 0; i < ROWS_EACH; i++)
#pragma unroll
    for (int p = 0; p < PACKETS; p++)
      if (row + i < rows && column + column_of(p) < width)
        use((long long)(row + i) * width + column + column_of(p), made[0][i] + p * N, made[1][i] + p * N);
}

// out = weight + scale * (first_a @ first_b) * (second_a @ second_b).
extern "C" __global__ void __launch_bounds__(256)
    hadamard_add(const T* weight, const T* first_a, const T* first_b, const T* second_a, const T* second_b, T* out,
                 const int rows, const int width, const int rank, const float scale) {
  __shared__ Tile tile;
  float made[2][ROWS_EACH][8];
  products(tile, made, first_a, first_b, second_a, second_b, rows, width, rank);
  each_packet(made, rows, width, [&](long long place, const float* first, const float* second) {
    float w[N];
    load(weight + place, w);
#pragma unroll
    for (int i = 0; i < N; i++) w[i] += scale * first[i] * second[i];
    store<T, N>(out + place, w);
  });
}

// of_products (2, rows, width): scale * dW times the other product, the gradients of first_a @ first_b and of the second.
extern "C" __global__ void __launch_bounds__(256)
    hadamard_gradients(const T* grad, const T* first_a, const T* first_b, const T* second_a, const T* second_b,
                       T* of_products, const int rows, const int width, const int rank, const float scale) {
  __shared__ Tile tile;
  float made[2][ROWS_EACH][8];
  products(tile, made, first_a, first_b, second_a, second_b, rows, width, rank);
  each_packet(made, rows, width, [&](long long place, const float* first, const float* second) {
    float g[N], of_first[N], of_second[N];
    load(grad + place, g);
#pragma unroll
    for (int i = 0; i < N; i++) {
      of_first[i] = scale * g[i] * second[i];
      of_second[i] = scale * g[i] * first[i];
    }
    store<T, N>(of_products + place, of_first);
    store<T, N>(of_products + (long long)rows * width + place, of_second);
  });
}
