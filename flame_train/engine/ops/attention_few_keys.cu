// Attention where all keys fit one tile, as a caption's do, and its gradients: one pass over the queries each.
//
// A block has all keys of one head in shared memory and takes tiles of queries at equal distances. A row's
// probabilities are there at once, so nothing is taken back when a larger score comes; and sum(g * out), which the
// softmax's gradient subtracts, is taken from them as sum(p * dp), so that `out` is not read. For the gradients a
// cluster of SHARE blocks has a head and adds up its keys' sums in a fixed order: no atomics, equal inputs give equal
// bits.
//
// Contract: q, g, out, dq (B, H, L, 64), k, v, dk, dv (B, H, S, 64), 1 <= S <= 80, of 16-bit elements at any strides,
// each array's batch, head and row steps (in elements, multiples of 8) following it, a row's 64 together, 16-byte
// aligned; lse fp32 (B, H, L), dense. Outputs are assigned (=). Grid: (B * H, any), gradients
// (B * H, SHARE); block: THREADS, gradients twice as many; shared memory: sizeof(Inputs), sizeof(Memory). Gradients need
// clusters: compute capability 9.0.
#include "warp_tiles.cuh"

#define INF __int_as_float(0x7f800000)
constexpr int HEAD = 64, KEYS = 80, QUERIES = 64, THREADS = 128;  // a warp has 16 queries
constexpr int PITCH = HEAD + 8, SCORES = KEYS + 8;                // of shared memory: eight rows lie in different banks
constexpr int SUMS = HEAD + 4;
constexpr int KEY_TILES = KEYS / 8, HALF_TILES = KEY_TILES / 2;   // eight keys each
constexpr int COLUMN_TILES = HEAD / 8, HALF_COLUMNS = HEAD / 2;

struct Inputs {
  T k[KEYS * PITCH], v[KEYS * PITCH], q[2][QUERIES * PITCH];
};
struct Memory {
  union {
    struct {
      T k[KEYS * PITCH], v[KEYS * PITCH];
      T q[2][QUERIES * PITCH], g[2][QUERIES * PITCH];
      T p[QUERIES * SCORES], ds[QUERIES * SCORES];
      float drop[2][QUERIES];
    };
    float sums[2][KEYS * SUMS];  // of dv and dk, when all else is done with
  };
};

// The rows of one head
struct Rows {
  T* at;
  long long step;
  __device__ __forceinline__ Rows(T* array, long long batch, long long head, long long row, int heads)
      : at(array + blockIdx.x / heads * batch + blockIdx.x % heads * head), step(row) {}
};

__device__ __forceinline__ unsigned pair(float low, float high) {
  T both[2] = {from_float<T>(low), from_float<T>(high)};
  return *reinterpret_cast<unsigned*>(both);
}
// Which rows and columns of 16 x 8 N values a lane has as products leave them: the columns 8 n + column (+ 1) of the rows
// `row` (elements 0, 1 of the n-th four) and row + 8 (2, 3).
struct Lane {
  int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
};

// To 16 rows of N times 8 columns, of which those before `left` are there.
template <int N>
__device__ __forceinline__ void put(T* to, long long step, int left, const float (&s)[N][4]) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = lane.row + i * 8;
    if (row >= left) continue;
#pragma unroll
    for (int n = 0; n < N; n++)
      *reinterpret_cast<unsigned*>(to + row * step + n * 8 + lane.column) = pair(s[n][2 * i], s[n][2 * i + 1]);
  }
}

// The sum of a value over the four lanes that share a row
__device__ __forceinline__ float over_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// COUNT rows from `first` on to shared memory, zeros beyond `rows`, by ALL threads
template <int COUNT, int ALL> __device__ __forceinline__ void fetch(T* to, const Rows& from, int first, int rows) {
  constexpr int PACKETS = COUNT * HEAD / 8;
#pragma unroll
  for (int i = 0; i < (PACKETS + ALL - 1) / ALL; i++) {
    int e = threadIdx.x + i * ALL, r = e / (HEAD / 8), c = e % (HEAD / 8) * 8;
    if (PACKETS % ALL && e >= PACKETS) break;
    bool there = first + r < rows;
    fetch16(to + r * PITCH + c, from.at + (there ? (first + r) * from.step + c : 0), there);
  }
}

// s (16 x 8 N) = 16 rows times N times 8 rows of `keys`, turned over. Where N is odd, eight more of these are read.
template <int N> __device__ __forceinline__ void products(float (&s)[N][4], const T* rows, const T* keys) {
  int lane = threadIdx.x % 32, row = lane % 8, part = lane / 8;
  rows += (row + part % 2 * 8) * PITCH + part / 2 * 8;
  keys += (row + part / 2 * 8) * PITCH + part % 2 * 8;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[n][e] = 0.f;
#pragma unroll
  for (int c = 0; c < HEAD; c += 16) {
    unsigned a[4], b[4];
    straight4(a, rows + c);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      straight4(b, keys + n * 8 * PITCH + c);
      multiply<T>(s[n], a, b);
      if (n + 1 < N) multiply<T>(s[n + 1], a, b + 2);
    }
  }
}

// Scores to probabilities, in place, and the log-sum-exp of the rows before `left`. A lane has what it has below.
__device__ __forceinline__ void softmax(float (&p)[KEY_TILES][4], float* lse, int left, int S, float scale) {
  const Lane lane;
  float top[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      p[n][e] = n * 8 + lane.column + e % 2 < S ? p[n][e] * scale : -INF;
      top[e / 2] = fmaxf(top[e / 2], p[n][e]);
    }
#pragma unroll
  for (int o = 1; o < 4; o *= 2)
#pragma unroll
    for (int i = 0; i < 2; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], o));
#pragma unroll
  for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      p[n][e] = __expf(p[n][e] - top[e / 2]);
      sum[e / 2] += p[n][e];
    }
#pragma unroll
  for (int i = 0; i < 2; i++) sum[i] = over_row(sum[i]);
#pragma unroll
  for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) p[n][e] *= 1.f / sum[e / 2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (lane.column == 0 && lane.row + i * 8 < left) lse[lane.row + i * 8] = top[i] + logf(sum[i]);
}

// to (16 x HEAD) = weights (16 x KEYS, in registers) times the keys' values
__device__ __forceinline__ void weigh(const float (&weights)[KEY_TILES][4], const T* values, T* to, long long step,
                                      int left) {
  int lane = threadIdx.x % 32;
  float sum[COLUMN_TILES][4] = {};
  values += (lane % 8 + lane / 8 % 2 * 8) * PITCH + lane / 16 * 8;
#pragma unroll
  for (int j = 0; j < KEYS; j += 16) {
    const float *low = weights[j / 8], *high = weights[j / 8 + 1];
    unsigned a[4] = {pair(low[0], low[1]), pair(low[2], low[3]), pair(high[0], high[1]), pair(high[2], high[3])}, b[4];
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n += 2) {
      turned4(b, values + j * PITCH + n * 8);
      multiply<T>(sum[n], a, b);
      multiply<T>(sum[n + 1], a, b + 2);
    }
  }
  put(to, step, left, sum);
}

__device__ __forceinline__ void forward(Rows q, Rows k, Rows v, Rows out, float* lse, int L, int S, float scale) {
  extern __shared__ __align__(16) unsigned char raw[];
  Inputs& memory = *reinterpret_cast<Inputs*>(raw);
  lse += (size_t)blockIdx.x * L;
  fetch<KEYS, THREADS>(memory.k, k, 0, S);
  fetch<KEYS, THREADS>(memory.v, v, 0, S);
  fetch<QUERIES, THREADS>(memory.q[0], q, blockIdx.y * QUERIES, L);
  asm volatile("cp.async.commit_group;");
  int stage = 0, rows = threadIdx.x / 32 * 16;
  for (int first = blockIdx.y * QUERIES; first < L; first += gridDim.y * QUERIES, stage ^= 1) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    int next = first + gridDim.y * QUERIES;
    if (next < L) fetch<QUERIES, THREADS>(memory.q[stage ^ 1], q, next, L);
    asm volatile("cp.async.commit_group;");
    float p[KEY_TILES][4];
    int own = first + rows;
    products(p, memory.q[stage] + rows * PITCH, memory.k);
    softmax(p, lse + own, L - own, S, scale);
    weigh(p, memory.v, out.at + own * out.step, out.step, L - own);
  }
}

// ---- gradients: warps i and i + 4 have 16 queries, each half of the keys, and half of the columns of dq ------------

// Scores to probabilities in place, the first key being the lane's `key`-th; sums[i] = their products with dp.
__device__ __forceinline__ void again(float (&p)[HALF_TILES][4], const float (&dp)[HALF_TILES][4], const float* lse,
                                      int left, int keys, float scale, float (&sums)[2]) {
  const Lane lane;
  float shift[2];
#pragma unroll
  for (int i = 0; i < 2; i++) shift[i] = lane.row + i * 8 < left ? lse[lane.row + i * 8] : 0.f, sums[i] = 0.f;
#pragma unroll
  for (int n = 0; n < HALF_TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      p[n][e] = n * 8 + lane.column + e % 2 < keys ? __expf(p[n][e] * scale - shift[e / 2]) : 0.f;
      sums[e / 2] += p[n][e] * dp[n][e];
    }
}

// Each row's sums of both warps that have it, added up by way of `shared`, which has QUERIES numbers of each half
__device__ __forceinline__ void exchange(float (&sums)[2], float (*shared)[QUERIES], int half, int rows) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sums[i] = over_row(sums[i]);
    if (lane.column == 0) shared[half][rows + lane.row + i * 8] = sums[i];
  }
  asm volatile("bar.sync %0, 64;" ::"r"(1 + rows / 16) : "memory");
#pragma unroll
  for (int i = 0; i < 2; i++) sums[i] = shared[0][rows + lane.row + i * 8] + shared[1][rows + lane.row + i * 8];
}

// to (16 x HALF_COLUMNS) = ds (16 x KEYS) times these columns of the keys
__device__ __forceinline__ void carry(const T* ds, const T* keys, T* to, long long step, int left) {
  int lane = threadIdx.x % 32, row = lane % 8, part = lane / 8;
  float sum[COLUMN_TILES / 2][4] = {};
  ds += (row + part % 2 * 8) * SCORES + part / 2 * 8;
  keys += (row + part % 2 * 8) * PITCH + part / 2 * 8;
#pragma unroll
  for (int j = 0; j < KEYS; j += 16) {
    unsigned a[4], b[4];
    straight4(a, ds + j);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES / 2; n += 2) {
      turned4(b, keys + j * PITCH + n * 8);
      multiply<T>(sum[n], a, b);
      multiply<T>(sum[n + 1], a, b + 2);
    }
  }
  put(to, step, left, sum);
}

// sum (KEYS x 16) += weights (QUERIES x KEYS), turned over, times 16 columns of `rows`
__device__ __forceinline__ void add_keys(float (&sum)[KEYS / 16][2][4], const T* weights, const T* rows) {
  int lane = threadIdx.x % 32, row = lane % 8, part = lane / 8;
  weights += (row + part / 2 * 8) * SCORES + part % 2 * 8;
  rows += (row + part % 2 * 8) * PITCH + part / 2 * 8;
#pragma unroll
  for (int i = 0; i < QUERIES; i += 16) {
    unsigned a[4], b[4];
    turned4(b, rows + i * PITCH);
#pragma unroll
    for (int m = 0; m < KEYS / 16; m++) {
      turned4(a, weights + i * SCORES + m * 16);
      multiply<T>(sum[m][0], a, b);
      multiply<T>(sum[m][1], a, b + 2);
    }
  }
}

__device__ __forceinline__ void share_sums(float* to, const float (&sum)[KEYS / 16][2][4]) {
  const Lane lane;
  to += lane.row * SUMS + lane.column;
#pragma unroll
  for (int m = 0; m < KEYS / 16; m++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) to[(m * 16 + e / 2 * 8) * SUMS + n * 8 + e % 2] = sum[m][n][e];
}

// The cluster's sums, of which this block adds up and writes its part
template <int SHARE> __device__ __forceinline__ void total(const float* sums, const Rows& to, int S) {
  for (int e = blockIdx.y * 2 * THREADS + threadIdx.x; e < S * HEAD / 4; e += SHARE * 2 * THREADS) {
    int row = e / (HEAD / 4), column = e % (HEAD / 4) * 4;
    const float4* own = reinterpret_cast<const float4*>(sums + row * SUMS + column);
    float4 t = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int block = 0; block < SHARE; block++) {
      float4 f = theirs(own, block);
      t.x += f.x, t.y += f.y, t.z += f.z, t.w += f.w;
    }
    *reinterpret_cast<uint2*>(to.at + row * to.step + column) = make_uint2(pair(t.x, t.y), pair(t.z, t.w));
  }
}

template <int SHARE>
__device__ __forceinline__ void gradients(Rows q, Rows k, Rows v, Rows g, Rows dq, Rows dk, Rows dv,
                                          const float* lse, int L, int S, float scale) {
  extern __shared__ __align__(16) unsigned char raw[];
  Memory& memory = *reinterpret_cast<Memory*>(raw);
  constexpr int ALL = 2 * THREADS, KEY_ROWS = HALF_TILES * 8;
  const int half = threadIdx.x / THREADS, rows = threadIdx.x % THREADS / 32 * 16, columns = half * HALF_COLUMNS;
  float sum[KEYS / 16][2][4] = {};  // 16 columns of dv by the first half of the warps, of dk by the second
  lse += (size_t)blockIdx.x * L;
  fetch<KEYS, ALL>(memory.k, k, 0, S);
  fetch<KEYS, ALL>(memory.v, v, 0, S);
  fetch<QUERIES, ALL>(memory.q[0], q, blockIdx.y * QUERIES, L);
  fetch<QUERIES, ALL>(memory.g[0], g, blockIdx.y * QUERIES, L);
  asm volatile("cp.async.commit_group;");
  int stage = 0;
  for (int first = blockIdx.y * QUERIES; first < L; first += SHARE * QUERIES, stage ^= 1) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    int next = first + SHARE * QUERIES;
    if (next < L) {
      fetch<QUERIES, ALL>(memory.q[stage ^ 1], q, next, L);
      fetch<QUERIES, ALL>(memory.g[stage ^ 1], g, next, L);
    }
    asm volatile("cp.async.commit_group;");
    const T *own_q = memory.q[stage] + rows * PITCH, *own_g = memory.g[stage] + rows * PITCH;
    const int own = first + rows, left = L - own, keys = half * KEY_ROWS;
    float p[HALF_TILES][4], dp[HALF_TILES][4], drop[2];
    products(p, own_q, memory.k + keys * PITCH);
    products(dp, own_g, memory.v + keys * PITCH);
    again(p, dp, lse + own, left, S - keys, scale, drop);
    put(memory.p + rows * SCORES + keys, SCORES, QUERIES, p);
    exchange(drop, memory.drop, half, rows);
#pragma unroll
    for (int n = 0; n < HALF_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) dp[n][e] = p[n][e] * (dp[n][e] - drop[e / 2]) * scale;
    put(memory.ds + rows * SCORES + keys, SCORES, QUERIES, dp);
    __syncthreads();
    carry(memory.ds + rows * SCORES, memory.k + columns, dq.at + own * dq.step + columns, dq.step, left);
    if (half) add_keys(sum, memory.ds, memory.q[stage] + rows);
    else add_keys(sum, memory.p, memory.g[stage] + rows);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  share_sums(memory.sums[half] + rows, sum);
  everyone();
  total<SHARE>(memory.sums[0], dv, S);
  total<SHARE>(memory.sums[1], dk, S);
  everyone();
}

#define ROWS(NAME) Rows(NAME, NAME##_batch, NAME##_head, NAME##_row, heads)
extern "C" __global__ void __launch_bounds__(THREADS)
    few_keys_forward(T* q, long long q_batch, long long q_head, long long q_row, T* k, long long k_batch,
                     long long k_head, long long k_row, T* v, long long v_batch, long long v_head, long long v_row,
                     T* out, long long out_batch, long long out_head, long long out_row, float* lse, int heads, int L,
                     int S, float scale) {
  forward(ROWS(q), ROWS(k), ROWS(v), ROWS(out), lse, L, S, scale);
}

#define KERNEL(NAME, SHARE)                                                                                           \
  extern "C" __cluster_dims__(1, SHARE, 1) __global__ void __launch_bounds__(2 * THREADS, 2)                          \
      NAME(T* q, long long q_batch, long long q_head, long long q_row, T* k, long long k_batch, long long k_head,     \
           long long k_row, T* v, long long v_batch, long long v_head, long long v_row, T* g, long long g_batch,      \
           long long g_head, long long g_row, T* dq, long long dq_batch, long long dq_head, long long dq_row, T* dk,  \
           long long dk_batch, long long dk_head, long long dk_row, T* dv, long long dv_batch, long long dv_head,     \
           long long dv_row, const float* lse, int heads, int L, int S, float scale) {                                \
    gradients<SHARE>(ROWS(q), ROWS(k), ROWS(v), ROWS(g), ROWS(dq), ROWS(dk), ROWS(dv), lse, L, S, scale);             \
  }
KERNEL(few_keys_gradients_2, 2)
KERNEL(few_keys_gradients_4, 4)
KERNEL(few_keys_gradients_8, 8)
