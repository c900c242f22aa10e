// Scaled dot-product attention tile by tile, forward and gradients, for one class of head sizes; fp32 inside.
//
// With s = scale * q.k + mask, p = exp(s - lse) and ds = p * (g.v - drop) * scale, every result is a sum over the other
// side's rows, weighted:
//   FORWARD  for a query, p over the values (FlashAttention, arXiv 2205.14135: running maximum and sum, divided at the end)
//   VALUE    for a key, p over the rows of g
//   QUERY    for a query, ds over the keys
//   KEY      for a key, ds over the queries
// so one loop serves all four: a block has a tile of own rows and goes through the other side's rows tile by tile. Scores
// live in registers, weights in shared memory, sums in registers. Each sum has one owner and a fixed order: no atomics,
// equal inputs give equal bits.
//
// Contract: HEAD is at least E and V. q, g, out (N * group, L, E or V), k, v (N, S, E or V) dense and row-major; `group`
// query heads share a key head. lse, drop fp32 (N * group, L); lse is +inf for a query that may look nowhere, whose out
// is 0. mask: none (0), bool (1) or T, added (2), at (batch, head, query, key) times its strides, batch * heads + head
// counting q's heads. `wide`: E and V are multiples of 4 and all addresses of 16 bytes. Grid: tiles of ROWS own rows
// times heads; block: TX * TY. Outputs are assigned (=).
#pragma once
#include "common.cuh"

enum Kind { FORWARD, VALUE, QUERY, KEY };

// Thread (x, y) of TX * TY has the own rows y + TY * i, i < RM, and the other rows x + TX * j, j < RN, of a tile of ROWS x
// ROWS; it has RC columns of the sums. JC rows of what is summed are in shared memory at a time.
const int ROWS = 64, D = HEAD, TX = D > 256 ? 32 : 16, TY = D > 128 ? (D > 256 ? 8 : 16) : 8;
const int RM = ROWS / TY, RN = ROWS / TX, RC = D / TX, THREADS = TX * TY, JC = D > 256 ? 8 : D > 128 ? 16 : 32;

#define INF __int_as_float(0x7f800000)

const int KC = 32;         // columns of both sides in shared memory at a time, for products
const int PITCH = KC + 4;  // keeps eight rows' packets of four in different banks
const int STRIDE = ROWS + 4;  // of the weights, likewise

struct Problem {
  const T *q, *k, *v, *g;
  const float* drop;
  const void* mask;
  int masked, causal, wide, heads, group, L, S, E, V;
  long long mask_batch, mask_head, mask_query, mask_key;
  float scale;
};

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
template <typename S> __device__ __forceinline__ float4 load4(const S* p) {
  struct alignas(8) Four { S e[4]; } q = *reinterpret_cast<const Four*>(p);
  return make_float4(to_float(q.e[0]), to_float(q.e[1]), to_float(q.e[2]), to_float(q.e[3]));
}

// COUNT x COLUMNS of `from` (rows x width) from (row, column) on, zeros beyond its edges
template <int COUNT, int COLUMNS, int PITCH>
__device__ __forceinline__ void fetch(float* to, const T* from, int width, int rows, int row, int column, int wide) {
  if (wide) {
#pragma unroll
    for (int i = threadIdx.x; i < COUNT * COLUMNS / 4; i += THREADS) {
      int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
      float4 f = make_float4(0.f, 0.f, 0.f, 0.f);
      if (row + r < rows && column + c < width) f = load4(from + (size_t)(row + r) * width + column + c);
      *reinterpret_cast<float4*>(to + r * PITCH + c) = f;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < COUNT * COLUMNS; i += THREADS) {
      int r = i / COLUMNS, c = i % COLUMNS;
      bool inside = row + r < rows && column + c < width;
      to[r * PITCH + c] = inside ? to_float(from[(size_t)(row + r) * width + column + c]) : 0.f;
    }
  }
}

// s[i][j] = own row i . other row j, over `width` columns
__device__ __forceinline__ void products(float (&s)[RM][RN], float* shared, const T* own, int own_rows, int own_row,
                                         const T* other, int other_rows, int other_row, int width, int wide) {
  int x = threadIdx.x % TX, y = threadIdx.x / TX;
  float *a = shared, *b = shared + ROWS * PITCH;
#pragma unroll
  for (int i = 0; i < RM; i++)
#pragma unroll
    for (int j = 0; j < RN; j++) s[i][j] = 0.f;
#pragma unroll 1
  for (int column = 0; column < width; column += KC) {
    __syncthreads();
    fetch<ROWS, KC, PITCH>(a, own, width, own_rows, own_row, column, wide);
    fetch<ROWS, KC, PITCH>(b, other, width, other_rows, other_row, column, wide);
    __syncthreads();
#pragma unroll 2
    for (int k = 0; k < KC; k += 4) {
      float4 w[RN];
#pragma unroll
      for (int j = 0; j < RN; j++) w[j] = *reinterpret_cast<const float4*>(b + (x + TX * j) * PITCH + k);
#pragma unroll
      for (int i = 0; i < RM; i++) {
        float4 u = *reinterpret_cast<const float4*>(a + (y + TY * i) * PITCH + k);
#pragma unroll
        for (int j = 0; j < RN; j++) s[i][j] = fmaf(u.x, w[j].x, s[i][j]);
#pragma unroll
        for (int j = 0; j < RN; j++) s[i][j] = fmaf(u.y, w[j].y, s[i][j]);
#pragma unroll
        for (int j = 0; j < RN; j++) s[i][j] = fmaf(u.z, w[j].z, s[i][j]);
#pragma unroll
        for (int j = 0; j < RN; j++) s[i][j] = fmaf(u.w, w[j].w, s[i][j]);
      }
    }
  }
}

// sum[i] += weights of own row i . rows of `from`, from `row` on
__device__ __forceinline__ void accumulate(float (&sum)[RM][RC], const float* weights, float* shared, const T* from,
                                           int width, int rows, int row, int wide) {
  int x = threadIdx.x % TX, y = threadIdx.x / TX;
#pragma unroll 1
  for (int j = 0; j < ROWS && row + j < rows; j += JC) {
    __syncthreads();
    fetch<JC, D, D>(shared, from, width, rows, row + j, 0, wide);
    __syncthreads();
#pragma unroll 1
    for (int n = 0; n < JC; n += 4) {
      float4 w[RM];
#pragma unroll
      for (int i = 0; i < RM; i++)
        w[i] = *reinterpret_cast<const float4*>(weights + (y + TY * i) * STRIDE + j + n);
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int c = 0; c < RC; c += 4) {
          float4 u = *reinterpret_cast<const float4*>(shared + (n + m) * D + x * 4 + TX * c);
#pragma unroll
          for (int i = 0; i < RM; i++) {
            float t = m == 0 ? w[i].x : m == 1 ? w[i].y : m == 2 ? w[i].z : w[i].w;
            sum[i][c] = fmaf(t, u.x, sum[i][c]);
            sum[i][c + 1] = fmaf(t, u.y, sum[i][c + 1]);
            sum[i][c + 2] = fmaf(t, u.z, sum[i][c + 2]);
            sum[i][c + 3] = fmaf(t, u.w, sum[i][c + 3]);
          }
        }
    }
  }
}

// A score after edges, causality and mask
__device__ __forceinline__ float masked(const Problem& p, float s, int head, int query, int key) {
  if (query >= p.L || key >= p.S || (p.causal && key > query)) return -INF;
  if (!p.masked) return s;
  long long at = head / p.heads * p.mask_batch + head % p.heads * p.mask_head + query * p.mask_query + key * p.mask_key;
  if (p.masked == 1) return static_cast<const bool*>(p.mask)[at] ? s : -INF;
  return s + to_float(static_cast<const T*>(p.mask)[at]);
}

// The products of a tile as scores. Tiles that edges, causality or a mask touch go through `mine`, the thread's part of
// the weights, element by element in a loop.
template <bool BY_KEY>
__device__ __forceinline__ void scores(float (&s)[RM][RN], float* mine, const Problem& p, int head, int row, int col) {
#pragma unroll
  for (int i = 0; i < RM; i++)
#pragma unroll
    for (int j = 0; j < RN; j++) s[i][j] *= p.scale;
  int query = BY_KEY ? col : row, key = BY_KEY ? row : col;
  if (!p.masked && query + ROWS <= p.L && key + ROWS <= p.S && !(p.causal && key + ROWS - 1 > query)) return;
#pragma unroll
  for (int i = 0; i < RM; i++)
#pragma unroll
    for (int j = 0; j < RN; j++) mine[TY * i * STRIDE + TX * j] = s[i][j];
#pragma unroll 1
  for (int n = 0; n < RM * RN; n++) {
    int a = row + threadIdx.x / TX + TY * (n / RN), b = col + threadIdx.x % TX + TX * (n % RN);
    float* at = mine + TY * (n / RN) * STRIDE + TX * (n % RN);
    *at = masked(p, *at, head, BY_KEY ? b : a, BY_KEY ? a : b);
  }
#pragma unroll
  for (int i = 0; i < RM; i++)
#pragma unroll
    for (int j = 0; j < RN; j++) s[i][j] = mine[TY * i * STRIDE + TX * j];
}

// Over the threads that share a row
template <int COUNT> __device__ __forceinline__ float row_max(float v) {
#pragma unroll
  for (int o = COUNT / 2; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
template <int COUNT> __device__ __forceinline__ float row_sum(float v) {
#pragma unroll
  for (int o = COUNT / 2; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// One tile's scores against the running maximum and sum; what was summed so far shrinks with a new maximum
__device__ __forceinline__ void soften(float (&s)[RM][RN], float (&sum)[RM][RC], float (&top)[RM], float (&total)[RM]) {
#pragma unroll
  for (int i = 0; i < RM; i++) {
    float high = top[i];
#pragma unroll
    for (int j = 0; j < RN; j++) high = fmaxf(high, s[i][j]);
    high = row_max<TX>(high);
    float base = high == -INF ? 0.f : high, shrink = expf(top[i] - base);
    top[i] = high;
    total[i] *= shrink;
#pragma unroll
    for (int c = 0; c < RC; c++) sum[i][c] *= shrink;
#pragma unroll
    for (int j = 0; j < RN; j++) total[i] += s[i][j] = expf(s[i][j] - base);
  }
}

template <Kind KIND> __device__ __forceinline__ void attend(const Problem& p, T* out, float* lse) {
  const bool BY_KEY = KIND == VALUE || KIND == KEY, SLOPE = KIND == QUERY || KIND == KEY;
  __shared__ __align__(16) float weights[ROWS * STRIDE], buffer[2 * ROWS * PITCH];
  static_assert(JC * D <= 2 * ROWS * PITCH, "the summed rows share the products' buffer");
  int x = threadIdx.x % TX, y = threadIdx.x / TX;
  float* mine = weights + y * STRIDE + x;
  int own = BY_KEY ? p.S : p.L, other = BY_KEY ? p.L : p.S, tiles = (own + ROWS - 1) / ROWS;
  int head = blockIdx.x / tiles, row = blockIdx.x % tiles * ROWS;
  int first = BY_KEY && p.causal ? row : 0, last = !BY_KEY && p.causal ? min(other, row + ROWS) : other;
  float sum[RM][RC] = {}, top[RM], total[RM] = {};
#pragma unroll
  for (int i = 0; i < RM; i++) top[i] = -INF;
  for (int member = 0; member < (BY_KEY ? p.group : 1); member++) {
    int hq = BY_KEY ? head * p.group + member : head, hk = BY_KEY ? head : head / p.group;
    const T *q = p.q + (size_t)hq * p.L * p.E, *k = p.k + (size_t)hk * p.S * p.E;
    const T *v = p.v + (size_t)hk * p.S * p.V, *g = p.g + (size_t)hq * p.L * p.V;
    const float *logs = lse + (size_t)hq * p.L, *drop = p.drop + (size_t)hq * p.L;
#pragma unroll 1
    for (int col = first; col < last; col += ROWS) {
      float s[RM][RN];
      products(s, buffer, BY_KEY ? k : q, own, row, BY_KEY ? q : k, other, col, p.E, p.wide);
      scores<BY_KEY>(s, mine, p, hq, row, col);
      if (KIND == FORWARD) soften(s, sum, top, total);
#pragma unroll
      for (int i = 0; i < RM; i++)
#pragma unroll
        for (int j = 0; j < RN; j++) {
          int query = BY_KEY ? col + x + TX * j : row + y + TY * i;
          mine[TY * i * STRIDE + TX * j] = KIND == FORWARD ? s[i][j] : expf(s[i][j] - logs[min(query, p.L - 1)]);
        }
      if (SLOPE) {
        products(s, buffer, BY_KEY ? v : g, own, row, BY_KEY ? g : v, other, col, p.V, p.wide);
#pragma unroll
        for (int i = 0; i < RM; i++)
#pragma unroll
          for (int j = 0; j < RN; j++) {
            int query = BY_KEY ? col + x + TX * j : row + y + TY * i;
            mine[TY * i * STRIDE + TX * j] *= (s[i][j] - drop[min(query, p.L - 1)]) * p.scale;
          }
      }
      __syncwarp();  // a row's weights come from the threads of one warp
      const T* from = KIND == FORWARD ? v : KIND == VALUE ? g : KIND == QUERY ? k : q;
      accumulate(sum, weights, buffer, from, SLOPE ? p.E : p.V, other, col, p.wide);
    }
  }
  int width = SLOPE ? p.E : p.V;
#pragma unroll
  for (int i = 0; i < RM; i++) {
    int r = row + y + TY * i;
    float all = KIND == FORWARD ? row_sum<TX>(total[i]) : 1.f, part = all == 0.f ? 0.f : 1.f / all;
    if (r >= own) continue;
    if (KIND == FORWARD && x == 0) lse[(size_t)head * own + r] = all == 0.f ? INF : top[i] + logf(all);
#pragma unroll
    for (int c = 0; c < RC; c++) {
      int column = x * 4 + TX * (c & ~3) + (c & 3);
      if (column < width) out[((size_t)head * own + r) * width + column] = from_float<T>(sum[i][c] * part);
    }
  }
}

#define KERNEL(NAME, KIND)                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
      NAME(const T* q, const T* k, const T* v, const T* g, float* lse, const float* drop, const void* mask, T* out,   \
           int masked, int causal, int wide, int heads, int group, int L, int S, int E, int V, long long mask_batch, \
           long long mask_head, long long mask_query, long long mask_key, float scale) {                             \
    Problem p = {q, k, v, g, drop, mask, masked, causal, wide, heads, group, L, S, E, V,                             \
                 mask_batch, mask_head, mask_query, mask_key, scale};                                                \
    attend<KIND>(p, out, lse);                                                                                       \
  }
KERNEL(attention_forward, FORWARD)
KERNEL(attention_value, VALUE)
KERNEL(attention_query, QUERY)
KERNEL(attention_key, KEY)

// drop = sum(g * out) a row; one warp a row
extern "C" __global__ void attention_drop(const T* g, const T* out, float* drop, int rows, int V) {
  int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  float sum = 0.f;
  for (int c = lane; c < V; c += 32) sum += to_float(g[(size_t)row * V + c]) * to_float(out[(size_t)row * V + c]);
  sum = row_sum<32>(sum);
  if (lane == 0) drop[row] = sum;
}
