// What the kernels of rules are made of that keep means over a matrix's rows and columns; one block of THREADS a matrix.
//
// Contract: stands behind update.cuh. Sums are fp32 within a thread and a warp, fp64 over a matrix, in an order that the
// matrix's sizes alone decide. A parameter is gone over several times; all but the first find much of it in the L2 cache.
// Element e of a parameter is (batch, row, column, inner), the last varying fastest. Where `whole_at` is not negative the
// parameter is no matrix, and has a moment for each element. `fours` is true of a matrix each four elements of which, from
// a multiple of four, lie in a row: in those, rows and columns are counted rather than found by division.
struct Matrix {
  long long start;
  int batches, rows, cols, inner, row_at, col_at, whole_at, number, extra;
  bool fours;

  __device__ Matrix(const long long* table) {
    const long long* own = table + blockIdx.x * 10ll;
    start = own[0], batches = own[1], rows = own[2], cols = own[3], inner = own[4];
    row_at = own[5], col_at = own[6], whole_at = own[7], number = own[8], extra = own[9];
    fours = whole_at < 0 && batches == 1 && inner == 1 && cols % 4 == 0 && col_at % 4 == 0;
  }
  __device__ __forceinline__ int size() const { return batches * rows * cols * inner; }
  __device__ __forceinline__ int row(int e) const { return inner == 1 ? e / cols : e / (cols * inner) * inner + e % inner; }
  __device__ __forceinline__ int col(int e) const {
    const int line = cols * inner;
    return batches == 1 ? e % line : e / (rows * line) * line + e % line;
  }
};

// COUNT elements of a matrix from e, 1 or 4. `row` and `col` are those of the first, set where COUNT is 4 in `fours`.
template <int COUNT> struct Span {
  static constexpr int N = COUNT;
  int e, row, col;
};

template <int N> __device__ __forceinline__ Packet<float, N> values_at(const float* from, const Matrix& m, const Span<N>& at) {
  return *reinterpret_cast<const Packet<float, N>*>(from + m.start + at.e);
}
template <int N>
__device__ __forceinline__ Packet<float, N> gradient_at(const FlatParameters& arena, const Matrix& m, const Span<N>& at) {
  if constexpr (N == 4) return arena.gradient(m.start + at.e);
  else return {arena.gradient_at(m.start + at.e)};
}

// f of each four elements, by the block's threads; the last may reach over the matrix's end.
template <int UNROLL = 1, class F> __device__ __forceinline__ void over(const Matrix& m, F f) {
  constexpr int STEP = THREADS * 4;
  const int size = m.size(), first = threadIdx.x * 4, down = STEP / m.cols, along = STEP - down * m.cols;
  int row = first / m.cols, col = first - row * m.cols;
#pragma unroll UNROLL
  for (int e = first; e < size; e += STEP) {
    f(Span<4>{e, row, col});
    row += down, col += along;
    if (col >= m.cols) col -= m.cols, row++;
  }
}

struct Scratch {
  Four cols[2 * THREADS];
  float rows[4 * THREADS];
};
// The block's own, one for all that is made of these templates.
__device__ __forceinline__ Scratch& scratch() {
  __shared__ Scratch own;
  return own;
}

// How a matrix in `fours` is gone over once for the sums of its rows and of its columns. A tile is as wide as the lanes
// that have four columns each, a warp at most. A strip of lanes goes down every so many'th row of a tile.
struct Tiling {
  int lanes, tiles, strips;

  __device__ Tiling(const Matrix& m) : lanes(1) {
    while (lanes < 32 && lanes * 4 < m.cols) lanes *= 2;
    tiles = (m.cols / 4 + lanes - 1) / lanes, strips = THREADS / lanes;
  }
  __device__ bool fits(const Matrix& m) const { return m.fours && (tiles == 1 || m.rows * (long long)tiles <= 4 * THREADS); }
};

// The columns' sums of f down a strip's rows, of which there are `groups` strips in the tile. `out(row, total)`, by one lane,
// for what each row has in the tile. Rows are read AHEAD of the sums over lanes, so that these do not wait for one another.
template <class F, class Out>
__device__ __forceinline__ Four down_strip(const Matrix& m, int lanes, int group, int groups, int col, F f, Out out) {
  constexpr int AHEAD = 4;
  Four sum = {};
  for (int base = 0; base < m.rows; base += groups * AHEAD) {
    Four x[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int row = base + a * groups + group;
      x[a] = row < m.rows && col < m.cols ? f(Span<4>{row * m.cols + col, row, col}) : Four{};
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
      const int row = base + a * groups + group;
      float across = (x[a].e[0] + x[a].e[1]) + (x[a].e[2] + x[a].e[3]);
#pragma unroll
      for (int k = 0; k < 4; k++) sum.e[k] += x[a].e[k];
      for (int o = lanes / 2; o; o /= 2) across += __shfl_xor_sync(0xffffffffu, across, o);
      if (threadIdx.x % lanes == 0 && row < m.rows) out(row, across);
    }
  }
  return sum;
}

// Each row's sum of f to `totals`, and `out(column, total)` for each column's, by one thread; of a matrix that is tiled.
template <class F, class Out> __device__ void sum_both(const Matrix& m, const Tiling& t, F f, float* totals, Out out) {
  Scratch& own = scratch();
  const int lane = threadIdx.x % t.lanes, strip = threadIdx.x / t.lanes;
  for (int base = 0; base < t.tiles; base += 2 * t.strips) {
    const int here = min(t.tiles - base, 2 * t.strips), width = here * t.lanes;
    int parts = min(m.rows, 2 * t.strips / here);
    if (t.tiles == 1) {
      Four sum = down_strip(m, t.lanes, strip, t.strips, lane * 4, f, [&](int row, float x) { totals[row] = x; });
#pragma unroll
      for (int k = 0; k < 4; k++)
        for (int o = t.lanes; o < 32; o *= 2) sum.e[k] += __shfl_xor_sync(0xffffffffu, sum.e[k], o);
      parts = THREADS / 32;
      if (threadIdx.x % 32 < t.lanes) own.cols[threadIdx.x / 32 * t.lanes + lane] = sum;
    } else {
      for (int unit = strip; unit < here * parts; unit += t.strips) {
        const int tile = base + unit % here;
        own.cols[unit * t.lanes + lane] = down_strip(
            m, t.lanes, unit / here, parts, (tile * t.lanes + lane) * 4, f,
            [&](int row, float x) { own.rows[row * t.tiles + tile] = x; });
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += THREADS) {
      const int col = (base * t.lanes + c) * 4;
      if (col >= m.cols) break;
      Four sum = own.cols[c];
      for (int i = 1; i < parts; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) sum.e[k] += own.cols[i * width + c].e[k];
#pragma unroll
      for (int k = 0; k < 4; k++) out(col + k, sum.e[k]);
    }
    __syncthreads();
  }
  if (t.tiles == 1) return;
  for (int row = threadIdx.x; row < m.rows; row += THREADS) {
    float sum = own.rows[row * t.tiles];
    for (int i = 1; i < t.tiles; i++) sum += own.rows[row * t.tiles + i];
    totals[row] = sum;
  }
}

// Each row's sum of f to `totals`; of any matrix.
template <class F> __device__ void sum_rows(const Matrix& m, F f, float* totals) {
  int lanes = 1;
  while (lanes < 32 && lanes < m.cols) lanes *= 2;
  const int n = m.batches * m.rows * m.inner, lane = threadIdx.x % lanes;
  for (int base = 0; base < n; base += THREADS / lanes) {
    const int row = base + threadIdx.x / lanes, first = row / m.inner * m.cols * m.inner + row % m.inner;
    float sum = 0.f;
    if (row < n) {
#pragma unroll 4
      for (int j = lane; j < m.cols; j += lanes) sum += f(Span<1>{first + j * m.inner, 0, 0}).e[0];
    }
    for (int o = lanes / 2; o; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0 && row < n) totals[row] = sum;
  }
}

// `out(column, total)` for each column's sum of f, by one thread; of any matrix.
template <class F, class Out> __device__ void sum_columns(const Matrix& m, F f, Out out) {
  float* const part = scratch().rows;
  const int line = m.cols * m.inner, n = m.batches * line, across = min(n, THREADS), groups = THREADS / across;
  const int own = threadIdx.x % across, group = threadIdx.x / across;
  for (int base = 0; base < n; base += across) {
    const int c = base + own, first = c / line * m.rows * line + c % line;
    float sum = 0.f;
    if (c < n && group < groups) {
#pragma unroll 4
      for (int i = group; i < m.rows; i += groups) sum += f(Span<1>{first + i * line, 0, 0}).e[0];
    }
    __syncthreads();
    part[threadIdx.x] = sum;
    __syncthreads();
    if (c >= n || group) continue;
    for (int k = 1; k < groups; k++) sum += part[k * across + own];
    out(c, sum);
  }
}

// The sum over a matrix of f of each four elements; in every thread.
template <class F> __device__ double total(const Matrix& m, F f) {
  const int size = m.size();
  double sum = 0.0;
  over<4>(m, [&](const Span<4>& at) {
    Four x = f(at);
#pragma unroll
    for (int k = 1; k < 4; k++) x.e[k] = at.e + k < size ? x.e[k] : 0.f;
    sum += (x.e[0] + x.e[1]) + (x.e[2] + x.e[3]);
  });
  return block_sum<THREADS>(sum);
}

// The root of the mean square of f, as `total` has it.
template <class F> __device__ float rms(const Matrix& m, F f) {
  const double sum = total(m, [&](const Span<4>& at) {
    Four x = f(at);
#pragma unroll
    for (int k = 0; k < 4; k++) x.e[k] *= x.e[k];
    return x;
  });
  return (float)sqrt(sum / m.size());
}

// The moments of a matrix's rows and columns, and what was made of them: a factor for each row and for each column.
struct Factored {
  float *row, *col, *whole, *by_row, *by_col;

  // Sets each moment to beta * moment + one_minus_beta * (mean of f over its row or column), where f takes a span. Then
  // sets by_row to of_row(moment, the mean of the matrix's rows' moments), and by_col to of_col(moment).
  template <class F, class Row, class Col>
  __device__ void advance(const Matrix& m, F f, float beta, float one_minus_beta, Row of_row, Col of_col) const {
    if (m.whole_at >= 0) {
      for (int e = threadIdx.x; e < m.size(); e += THREADS) {
        float* const own = whole + m.whole_at + e;
        *own = beta * *own + one_minus_beta * f(Span<1>{e, 0, 0}).e[0];
      }
      __syncthreads();
      return;
    }
    float *const rows = row + m.row_at, *const cols = col + m.col_at, *const totals = by_row + m.row_at;
    const auto out = [&](int j, float sum) {
      const float moment = beta * cols[j] + one_minus_beta * (sum / m.rows);
      cols[j] = moment;
      by_col[m.col_at + j] = of_col(moment);
    };
    const Tiling tiling(m);
    if (tiling.fits(m)) {
      sum_both(m, tiling, f, totals, out);
    } else {
      sum_rows(m, f, totals);
      sum_columns(m, f, out);
    }
    __syncthreads();
    double sum = 0.0;
    for (int i = threadIdx.x; i < m.batches * m.rows * m.inner; i += THREADS) {
      const float moment = beta * rows[i] + one_minus_beta * (totals[i] / m.cols);
      rows[i] = moment, sum += moment;
    }
    const float mean = block_sum<THREADS>(sum) / m.rows;
    const int matrices = m.batches * m.inner;
    if (matrices == 1) {
      for (int i = threadIdx.x; i < m.rows; i += THREADS) totals[i] = of_row(rows[i], mean);
    } else {
      for (int b = threadIdx.x; b < matrices; b += THREADS) {
        const int first = b / m.inner * m.rows * m.inner + b % m.inner;
        float sum = 0.f;
        for (int i = 0; i < m.rows; i++) sum += rows[first + i * m.inner];
        for (int i = first; i < first + m.rows * m.inner; i += m.inner) totals[i] = of_row(rows[i], sum / m.rows);
      }
    }
    __syncthreads();
  }

  // The products of elements' factors, or of_whole(their moments); 0 behind the last element.
  template <int N, class Whole>
  __device__ __forceinline__ Packet<float, N> at(const Matrix& m, const Span<N>& s, Whole of_whole) const {
    Packet<float, N> found = {};
    if (N == 4 && m.fours) {
      const float of_row = by_row[m.row_at + s.row];
      found = *reinterpret_cast<const Packet<float, N>*>(by_col + m.col_at + s.col);
#pragma unroll
      for (int k = 0; k < N; k++) found.e[k] *= of_row;
      return found;
    }
#pragma unroll
    for (int k = 0; k < N; k++)
      if (s.e + k < m.size()) found.e[k] = one_at(m, s.e + k, of_whole);
    return found;
  }

 private:
  template <class Whole> __device__ __forceinline__ float one_at(const Matrix& m, int e, Whole of_whole) const {
    if (m.whole_at >= 0) return of_whole(whole[m.whole_at + e]);
    return by_row[m.row_at + m.row(e)] * by_col[m.col_at + m.col(e)];
  }
};

struct InverseRoot {
  __device__ __forceinline__ float operator()(float moment) const { return 1.f / sqrtf(moment); }
  __device__ __forceinline__ float operator()(float moment, float mean) const { return 1.f / sqrtf(moment / mean); }
};

// The gradient over the root of its factored second moment, for Adafactor, CAME and Automagic.
struct ScaledGradient {
  const FlatParameters& arena;
  const Matrix& m;
  const Factored& moments;

  // Sets the moments to beta * moment + one_minus_beta * the mean of the squared gradients, and 1e-30.
  __device__ __forceinline__ void advance(float beta, float one_minus_beta) const {
    const InverseRoot inverse;
    const auto square = [&](const auto& at) {
      auto g = gradient_at(arena, m, at);
#pragma unroll
      for (float& x : g.e) x = x * x + 1e-30f;
      return g;
    };
    moments.advance(m, square, beta, one_minus_beta, inverse, inverse);
  }
  template <int N> __device__ __forceinline__ Packet<float, N> operator()(const Span<N>& at) const {
    auto u = gradient_at(arena, m, at);
    const auto by = moments.at(m, at, InverseRoot());
#pragma unroll
    for (int k = 0; k < N; k++) u.e[k] *= by.e[k];
    return u;
  }
};
