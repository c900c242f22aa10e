// Scaled dot-product attention tile by tile, forward and gradients, for one class of head sizes; fp32 inside.
//
// With s = scale * q.k + mask, p = exp(s - lse) and ds = p * (g.v - drop) * scale, every result is a sum over the other
// side's rows, weighted.
//   FORWARD  for a query, p over the values (FlashAttention, arXiv 2205.14135).
//   VALUE    for a key, p over the rows of g.
//   QUERY    for a query, ds over the keys
//   KEY      for a key, ds over the queries
// so one loop serves all four: a block has a tile of own rows and goes through the other side's rows tile by tile. Scores
// live in registers, weights in shared memory, sums in registers. Each sum has one owner and a fixed order: no atomics,
// equal inputs give equal bits.
//
// Contract: HEAD is at least E and V. q, g, out (N * group, L, E or V), k, v (N, S, E or V). They are dense and
// row-major. Each `group` query heads share a key head. lse, drop fp32 (N * group, L); lse is +inf for a query that may
// look nowhere, whose out is 0. mask: none (0), bool (1) or T, added (2), at (batch, head, query, key) times its
// strides, batch * heads + head counting q's heads. `wide`: E and V are multiples of 4 and all addresses of 16 bytes.
// Grid: tiles of ROWS own rows times heads; block: THREADS. Outputs are assigned (=).
#pragma once
#include "backend/cuda/common.cuh"

enum Kind { FORWARD, VALUE, QUERY, KEY };

// Tiles are ROWS x ROWS. For products, thread (x, y) of PX * PY has the own rows y + PY * i, i < PM. It has the other rows
// x + PX * j, j < PN. For sums, thread (x, y) of TX * TY has the own rows y + TY * i, i < RM, and RC columns. What they
// multiply passes through shared memory in stages: KC columns of both sides, or JC rows of what is summed.
const int ROWS = 64, D = HEAD, THREADS = D > 256 ? 256 : 128;
const int PX = 16, PY = THREADS / PX, PM = ROWS / PY, PN = ROWS / PX;
const int TX = D > 128 ? 32 : 16, TY = THREADS / TX, RM = ROWS / TY, RC = D / TX;
const int KC = 16, JC = 2048 / D;
const int PITCH = KC + 4, STRIDE = ROWS + 4;  // keep eight rows' packets of four in different banks
const int STAGE = 2 * ROWS * PITCH;
#define INF __int_as_float(0x7f800000)

struct Problem {
  const T *q, *k, *v, *g;
  const float* drop;
  const void* mask;
  int masked, causal, wide, heads, group, L, S, E, V;
  long long mask_batch, mask_head, mask_query, mask_key;
  float scale;
};

// Four elements to shared memory as fp32, or zeros; fp32 goes there by itself, and is awaited by `arrived`
__device__ __forceinline__ void copy4(float* to, const float* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(valid ? 16 : 0));
#else
  float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
  *reinterpret_cast<float4*>(to) = valid ? *reinterpret_cast<const float4*>(from) : none;
#endif
}
template <typename S> __device__ __forceinline__ void copy4(float* to, const S* from, bool valid) {
  struct alignas(8) Four { S e[4]; } q;
  float4 f = make_float4(0.f, 0.f, 0.f, 0.f);
  if (valid) {
    q = *reinterpret_cast<const Four*>(from);
    f = make_float4(to_float(q.e[0]), to_float(q.e[1]), to_float(q.e[2]), to_float(q.e[3]));
  }
  *reinterpret_cast<float4*>(to) = f;
}

// The stage that was fetched last is there for all, and the one before is free
__device__ __forceinline__ void arrived() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncthreads();
}

// COUNT x COLUMNS of `from` (rows x width) from (row, column) on, zeros beyond its edges
template <int COUNT, int COLUMNS, int PITCH>
__device__ __forceinline__ void fetch(float* to, const T* from, int width, int rows, int row, int column, int wide) {
  if (wide) {
    const int EACH = THREADS / (COLUMNS / 4);
    int r = threadIdx.x / (COLUMNS / 4), c = threadIdx.x % (COLUMNS / 4) * 4;
    const T* p = from + (size_t)(row + r) * width + column + c;
#pragma unroll
    for (int n = 0; n < COUNT / EACH; n++) {
      bool valid = column + c < width && row + r + n * EACH < rows;
      copy4(to + (r + n * EACH) * PITCH + c, valid ? p + (size_t)n * EACH * width : from, valid);
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

// One side of a product or sum: a matrix of `rows` rows, of which those from `row` on are meant
struct Side {
  const T* at;
  int rows, row;
};

// s[i][j] = own row i . other row j, over `width` columns
__device__ __forceinline__ void products(float (&s)[PM][PN], float* buffer, int& stage, Side own, Side other, int width,
                                         int wide) {
  int x = threadIdx.x % PX, y = threadIdx.x / PX;
#pragma unroll
  for (int i = 0; i < PM; i++)
#pragma unroll
    for (int j = 0; j < PN; j++) s[i][j] = 0.f;
  float* to = buffer + (stage ^= STAGE);
  fetch<ROWS, KC, PITCH>(to, own.at, width, own.rows, own.row, 0, wide);
  fetch<ROWS, KC, PITCH>(to + ROWS * PITCH, other.at, width, other.rows, other.row, 0, wide);
#pragma unroll 1
  for (int column = KC; column < width + KC; column += KC) {
    const float *a = buffer + stage, *b = a + ROWS * PITCH;
    arrived();
    if (column < width) {
      to = buffer + (stage ^= STAGE);
      fetch<ROWS, KC, PITCH>(to, own.at, width, own.rows, own.row, column, wide);
      fetch<ROWS, KC, PITCH>(to + ROWS * PITCH, other.at, width, other.rows, other.row, column, wide);
    }
#pragma unroll
    for (int k = 0; k < KC; k += 4) {
      float4 w[PN];
#pragma unroll
      for (int j = 0; j < PN; j++) w[j] = *reinterpret_cast<const float4*>(b + (x + PX * j) * PITCH + k);
#pragma unroll
      for (int i = 0; i < PM; i++) {
        float4 u = *reinterpret_cast<const float4*>(a + (y + PY * i) * PITCH + k);
#pragma unroll
        for (int j = 0; j < PN; j++) s[i][j] = fmaf(u.x, w[j].x, s[i][j]);
#pragma unroll
        for (int j = 0; j < PN; j++) s[i][j] = fmaf(u.y, w[j].y, s[i][j]);
#pragma unroll
        for (int j = 0; j < PN; j++) s[i][j] = fmaf(u.z, w[j].z, s[i][j]);
#pragma unroll
        for (int j = 0; j < PN; j++) s[i][j] = fmaf(u.w, w[j].w, s[i][j]);
      }
    }
  }
}

// sum[i] = sum[i] * shrink + weights of own row i . rows of `from`; no `shrink` leaves the sum as it is
__device__ __forceinline__ void accumulate(float (&sum)[RM][RC], const float* weights, const float* shrink, float* buffer,
                                           int& stage, Side from, int width, int wide) {
  int x = threadIdx.x % TX, y = threadIdx.x / TX, count = min(ROWS, from.rows - from.row);
  fetch<JC, D, D>(buffer + (stage ^= STAGE), from.at, width, from.rows, from.row, 0, wide);
#pragma unroll 1
  for (int j = 0; j < count; j += JC) {
    const float* u = buffer + stage + x * 4;
    arrived();
    if (j == 0 && shrink) {
#pragma unroll
      for (int i = 0; i < RM; i++)
#pragma unroll
        for (int c = 0; c < RC; c++) sum[i][c] *= shrink[y + TY * i];
    }
    if (j + JC < count)
      fetch<JC, D, D>(buffer + (stage ^= STAGE), from.at, width, from.rows, from.row + j + JC, 0, wide);
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
          float4 v = *reinterpret_cast<const float4*>(u + (n + m) * D + TX * c);
#pragma unroll
          for (int i = 0; i < RM; i++) {
            float t = m == 0 ? w[i].x : m == 1 ? w[i].y : m == 2 ? w[i].z : w[i].w;
            sum[i][c] = fmaf(t, v.x, sum[i][c]);
            sum[i][c + 1] = fmaf(t, v.y, sum[i][c + 1]);
            sum[i][c + 2] = fmaf(t, v.z, sum[i][c + 2]);
            sum[i][c + 3] = fmaf(t, v.w, sum[i][c + 3]);
          }
        }
    }
  }
}

// A score after edges, causality and mask; `at` is where the head's mask begins
__device__ __forceinline__ float masked(const Problem& p, float s, long long at, int query, int key) {
  bool seen = query < p.L && key < p.S && !(p.causal && key > query);
  at += query * p.mask_query + key * p.mask_key;
  if (p.masked == 1) seen = seen && static_cast<const bool*>(p.mask)[at];
  if (p.masked == 2 && seen) s += to_float(static_cast<const T*>(p.mask)[at]);
  return seen ? s : -INF;
}

// The products of a tile as scores. Tiles that edges, causality or a mask touch go through `mine`, the thread's part of
// the weights, row by row in a loop.
template <bool BY_KEY>
__device__ __forceinline__ void scores(float (&s)[PM][PN], float* mine, const Problem& p, int head, int row, int col) {
#pragma unroll
  for (int i = 0; i < PM; i++)
#pragma unroll
    for (int j = 0; j < PN; j++) s[i][j] *= p.scale;
  int query = BY_KEY ? col : row, key = BY_KEY ? row : col;
  if (!p.masked && query + ROWS <= p.L && key + ROWS <= p.S && !(p.causal && key + ROWS - 1 > query)) return;
#pragma unroll
  for (int i = 0; i < PM; i++)
#pragma unroll
    for (int j = 0; j < PN; j++) mine[PY * i * STRIDE + PX * j] = s[i][j];
  long long at = head / p.heads * p.mask_batch + head % p.heads * p.mask_head;
#pragma unroll 1
  for (int i = 0; i < PM; i++) {
    float* four = mine + PY * i * STRIDE;
    int a = row + threadIdx.x / PX + PY * i, b = col + threadIdx.x % PX;
    float t[PN];
#pragma unroll
    for (int j = 0; j < PN; j++)
      t[j] = masked(p, four[PX * j], at, BY_KEY ? b + PX * j : a, BY_KEY ? a : b + PX * j);
#pragma unroll
    for (int j = 0; j < PN; j++) four[PX * j] = t[j];
  }
#pragma unroll
  for (int i = 0; i < PM; i++)
#pragma unroll
    for (int j = 0; j < PN; j++) s[i][j] = mine[PY * i * STRIDE + PX * j];
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

// One tile's scores against the running maximum and sum of their rows; what was summed so far is to shrink
__device__ __forceinline__ void soften(float (&s)[PM][PN], float (&top)[PM], float (&total)[PM], float* shrink) {
  int x = threadIdx.x % PX, y = threadIdx.x / PX;
#pragma unroll
  for (int i = 0; i < PM; i++) {
    float high = top[i];
#pragma unroll
    for (int j = 0; j < PN; j++) high = fmaxf(high, s[i][j]);
    high = row_max<PX>(high);
    float base = high == -INF ? 0.f : high, less = expf(top[i] - base);
    top[i] = high;
    total[i] *= less;
    if (x == 0) shrink[y + PY * i] = less;
#pragma unroll
    for (int j = 0; j < PN; j++) total[i] += s[i][j] = expf(s[i][j] - base);
  }
}

template <Kind KIND> __device__ __forceinline__ void attend(const Problem& p, T* out, float* lse) {
  const bool BY_KEY = KIND == VALUE || KIND == KEY, SLOPE = KIND == QUERY || KIND == KEY;
  __shared__ __align__(16) float weights[ROWS * STRIDE], buffer[2 * STAGE], by_row[ROWS];
  static_assert(JC * D <= STAGE, "a stage holds either");
  int x = threadIdx.x % PX, y = threadIdx.x / PX, stage = 0;
  float* mine = weights + y * STRIDE + x;
  int own = BY_KEY ? p.S : p.L, other = BY_KEY ? p.L : p.S, tiles = (own + ROWS - 1) / ROWS;
  int head = blockIdx.x / tiles, row = blockIdx.x % tiles * ROWS;
  int first = BY_KEY && p.causal ? row : 0, last = !BY_KEY && p.causal ? min(other, row + ROWS) : other;
  float sum[RM][RC] = {}, top[PM], total[PM] = {};
#pragma unroll
  for (int i = 0; i < PM; i++) top[i] = -INF;
  for (int member = 0; member < (BY_KEY ? p.group : 1); member++) {
    int hq = BY_KEY ? head * p.group + member : head, hk = BY_KEY ? head : head / p.group;
    const T *q = p.q + (size_t)hq * p.L * p.E, *k = p.k + (size_t)hk * p.S * p.E;
    const T *v = p.v + (size_t)hk * p.S * p.V, *g = p.g + (size_t)hq * p.L * p.V;
    const float *logs = lse + (size_t)hq * p.L, *drop = p.drop + (size_t)hq * p.L;
#pragma unroll 1
    for (int col = first; col < last; col += ROWS) {
      float s[PM][PN];
      products(s, buffer, stage, {BY_KEY ? k : q, own, row}, {BY_KEY ? q : k, other, col}, p.E, p.wide);
      scores<BY_KEY>(s, mine, p, hq, row, col);
      if (KIND == FORWARD) soften(s, top, total, by_row);
#pragma unroll
      for (int i = 0; i < PM; i++)
#pragma unroll
        for (int j = 0; j < PN; j++) {
          int query = BY_KEY ? col + x + PX * j : row + y + PY * i;
          mine[PY * i * STRIDE + PX * j] = KIND == FORWARD ? s[i][j] : expf(s[i][j] - logs[min(query, p.L - 1)]);
        }
      if (SLOPE) {
        products(s, buffer, stage, {BY_KEY ? v : g, own, row}, {BY_KEY ? g : v, other, col}, p.V, p.wide);
#pragma unroll
        for (int i = 0; i < PM; i++)
#pragma unroll
          for (int j = 0; j < PN; j++) {
            int query = BY_KEY ? col + x + PX * j : row + y + PY * i;
            mine[PY * i * STRIDE + PX * j] *= (s[i][j] - drop[min(query, p.L - 1)]) * p.scale;
          }
      }
      const T* from = KIND == FORWARD ? v : KIND == VALUE ? g : KIND == QUERY ? k : q;
      accumulate(sum, weights, KIND == FORWARD ? by_row : nullptr, buffer, stage, {from, other, col},
                 SLOPE ? p.E : p.V, p.wide);
    }
  }
  if (KIND == FORWARD) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PM; i++) {
      float all = row_sum<PX>(total[i]);
      int r = y + PY * i;
      if (x == 0) by_row[r] = all == 0.f ? 0.f : 1.f / all;
      if (x == 0 && row + r < own) lse[(size_t)head * own + row + r] = all == 0.f ? INF : top[i] + logf(all);
    }
    __syncthreads();
  }
  int width = SLOPE ? p.E : p.V;
#pragma unroll
  for (int i = 0; i < RM; i++) {
    int r = threadIdx.x / TX + TY * i;
    if (row + r >= own) continue;
    float part = KIND == FORWARD ? by_row[r] : 1.f;
    T* to = out + ((size_t)head * own + row + r) * width;
#pragma unroll
    for (int c = 0; c < RC; c++) {
      int column = threadIdx.x % TX * 4 + TX * (c & ~3) + (c & 3);
      if (column < width) to[column] = from_float<T>(sum[i][c] * part);
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
#if HEAD <= 256  // gradients of larger heads are faster as matrix products
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
#endif
