// A weight with a Kronecker product added, and the gradients of the product's two matrices from one pass over dW.
//
// Contract: arrays are dense, weight and dW (A, B, C, width), first (A, C), second (B, width). A packet is N elements
// of T, `width` a multiple of it, and arrays begin at multiples of 16 bytes. Sums are fp32, their order that of shapes.
#pragma once

constexpr int THREADS = 256;  // the most of a block
constexpr int ROWS_A = 8;     // the most rows of `first` that a block sums over
constexpr int ROWS_B = 4;     // rows of `second` that it does

__device__ __forceinline__ void load(const T* from, float* f) {
  const Packet<T, N> q = *reinterpret_cast<const Packet<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; i++) f[i] = to_float(q.e[i]);
}

// out[a, b, c, :] = weight[a, b, c, :] + scale * first[a, c] * second[b, :], a block for each (a, b).
extern "C" __global__ void __launch_bounds__(256)
    kron_add(const T* weight, const T* first, const T* second, T* out, const int b_count, const int c_count,
             const int width, const float scale) {
  const int a = blockIdx.x / b_count, b = blockIdx.x % b_count, packets = width / N;
  const long long begin = (long long)blockIdx.x * c_count * width;
  for (int p = threadIdx.x; p < c_count * packets; p += blockDim.x) {
    const int c = p / packets;
    float w[N], s[N];
    load(weight + begin + (long long)p * N, w);
    load(second + (long long)b * width + (p - c * packets) * N, s);
    const float f = scale * to_float(first[a * c_count + c]);
#pragma unroll
    for (int i = 0; i < N; i++) w[i] += f * s[i];
    store<T, N>(out + begin + (long long)p * N, w);
  }
}

// Parts of sum_{b, i} dW[a, b, c, i] second[b, i] and sum_{a, c} dW[a, b, c, i] first[a, c].
//
// Thread (lane, pack) keeps one c and one packet of columns. Its block has `lanes` times `packs` threads, and goes
// through `rows_a` <= ROWS_A of a and ROWS_B of b. Blocks are (tile of b, tile of a, chunk of c times chunk of packets).
// Part (tile of b, chunk of packets) of `part_first` is (A, C); part (tile of a, chunk of c) of `part_second` (B, width).
extern "C" __global__ void __launch_bounds__(256)
    kron_gradients(const T* grad, const T* first, const T* second, float* part_first, float* part_second,
                   const int a_count, const int b_count, const int c_count, const int width, const int rows_a,
                   const int lanes, const int packs) {
  __shared__ float of_first[ROWS_A][THREADS];
  __shared__ float of_second[ROWS_B][THREADS * N];
  const int packets = width / N, pack_chunks = (packets + packs - 1) / packs, t = threadIdx.x;
  const int c_chunk = blockIdx.z / pack_chunks, pack_chunk = blockIdx.z % pack_chunks;
  const int c = c_chunk * lanes + t / packs, pack = pack_chunk * packs + t % packs;
  const int a0 = blockIdx.y * rows_a, b0 = blockIdx.x * ROWS_B;
  const int here_a = min(rows_a, a_count - a0), here_b = min(ROWS_B, b_count - b0);
  const bool inside = c < c_count && pack < packets;
  float sums[ROWS_B][N], other[ROWS_B][N];
#pragma unroll
  for (int j = 0; j < ROWS_B; j++) {
#pragma unroll
    for (int i = 0; i < N; i++) sums[j][i] = other[j][i] = 0.0f;
    if (inside && j < here_b) load(second + (long long)(b0 + j) * width + pack * N, other[j]);
  }
  for (int r = 0; r < here_a; r++) {
    const long long row = (long long)(a0 + r) * b_count + b0;
    const float f = inside ? to_float(first[(a0 + r) * c_count + c]) : 0.0f;
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < ROWS_B; j++) {
      if (!inside || j >= here_b) continue;
      float g[N];
      load(grad + ((row + j) * c_count + c) * width + pack * N, g);
#pragma unroll
      for (int i = 0; i < N; i++) {
        dot += g[i] * other[j][i];
        sums[j][i] += g[i] * f;
      }
    }
    of_first[r][t] = dot;
  }
#pragma unroll
  for (int j = 0; j < ROWS_B; j++)
#pragma unroll
    for (int i = 0; i < N; i++) of_second[j][t * N + i] = sums[j][i];
  __syncthreads();
  for (int k = t; k < here_a * lanes; k += blockDim.x) {
    const int r = k / lanes, lane = k % lanes;
    if (c_chunk * lanes + lane >= c_count) continue;
    float sum = 0.0f;
    for (int p = 0; p < packs; p++) sum += of_first[r][lane * packs + p];
    const long long part = (long long)blockIdx.x * pack_chunks + pack_chunk;
    part_first[(part * a_count + a0 + r) * c_count + c_chunk * lanes + lane] = sum;
  }
  const int columns = packs * N, c_chunks = (c_count + lanes - 1) / lanes;
  for (int k = t; k < here_b * columns; k += blockDim.x) {
    const int j = k / columns, q = k % columns;
    if (pack_chunk * columns + q >= width) continue;
    float sum = 0.0f;
    for (int lane = 0; lane < lanes; lane++) sum += of_second[j][lane * columns + q];
    const long long part = (long long)blockIdx.y * c_chunks + c_chunk;
    part_second[(part * b_count + b0 + j) * width + pack_chunk * columns + q] = sum;
  }
}

// The sums of the parts of both, times scale, a thread for each; added to what is there where `adds` says so.
extern "C" __global__ void __launch_bounds__(256)
    kron_sums(const float* part_first, const float* part_second, FIRST* first, SECOND* second, const int first_size,
              const int second_size, const int first_parts, const int second_parts, const int first_adds,
              const int second_adds, const float scale) {
  int i = blockIdx.x * 256 + threadIdx.x;
  const bool is_first = i < first_size;
  if (!is_first) i -= first_size;
  const int size = is_first ? first_size : second_size, parts = is_first ? first_parts : second_parts;
  if (i >= size) return;
  const float* from = (is_first ? part_first : part_second) + i;
  float sum = 0.0f;
#pragma unroll 8
  for (int p = 0; p < parts; p++) sum += from[(long long)p * size];
  sum *= scale;
  if (is_first) {
    from_float(first_adds ? to_float(first[i]) + sum : sum, first[i]);
  } else {
    from_float(second_adds ? to_float(second[i]) + sum : sum, second[i]);
  }
}
