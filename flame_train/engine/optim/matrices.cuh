// What the kernels of rules are made of that keep means over a matrix's rows and columns; one block of THREADS a matrix.
//
// Contract: stands behind update.cuh. Sums are fp32 within a thread and a warp, fp64 over a matrix, in an order that the
// matrix's sizes alone decide. A parameter is gone over several times; all but the first find it in the L2 cache.
// Element e of a parameter is (batch, row, column, inner), the last varying fastest. Where `whole_at` is not negative the
// parameter is no matrix, and has a moment for each element.
struct Matrix {
  long long start;
  int batches, rows, cols, inner, row_at, col_at, whole_at, number, extra;

  __device__ Matrix(const long long* table) {
    const long long* own = table + blockIdx.x * 10ll;
    start = own[0], batches = own[1], rows = own[2], cols = own[3], inner = own[4];
    row_at = own[5], col_at = own[6], whole_at = own[7], number = own[8], extra = own[9];
  }
  __device__ __forceinline__ int size() const { return batches * rows * cols * inner; }
  __device__ __forceinline__ int row(int e) const { return inner == 1 ? e / cols : e / (cols * inner) * inner + e % inner; }
  __device__ __forceinline__ int col(int e) const {
    const int line = cols * inner;
    return batches == 1 ? e % line : e / (rows * line) * line + e % line;
  }
};

// `out(row, total)` for each row's sum of f(element), by one thread.
template <class F, class Out> __device__ void sum_rows(const Matrix& m, F f, Out out) {
  int lanes = 1;
  while (lanes < 32 && lanes < m.cols) lanes *= 2;
  const int n = m.batches * m.rows * m.inner, lane = threadIdx.x % lanes;
  for (int base = 0; base < n; base += THREADS / lanes) {
    const int row = base + threadIdx.x / lanes, first = row / m.inner * m.cols * m.inner + row % m.inner;
    float sum = 0.f;
    if (row < n) {
#pragma unroll 4
      for (int j = lane; j < m.cols; j += lanes) sum += f(first + j * m.inner);
    }
    for (int o = lanes / 2; o; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0 && row < n) out(row, sum);
  }
}

// `out(column, total)` for each column's sum of f(element), by one thread.
template <class F, class Out> __device__ void sum_columns(const Matrix& m, F f, Out out) {
  __shared__ float part[THREADS];
  const int line = m.cols * m.inner, n = m.batches * line, across = min(n, THREADS), groups = THREADS / across;
  const int own = threadIdx.x % across, group = threadIdx.x / across;
  for (int base = 0; base < n; base += across) {
    const int c = base + own, first = c / line * m.rows * line + c % line;
    float sum = 0.f;
    if (c < n && group < groups) {
#pragma unroll 4
      for (int i = group; i < m.rows; i += groups) sum += f(first + i * line);
    }
    __syncthreads();
    part[threadIdx.x] = sum;
    __syncthreads();
    if (c >= n || group) continue;
    for (int k = 1; k < groups; k++) sum += part[k * across + own];
    out(c, sum);
  }
}

// The sum over a matrix of f, which gives the values of four elements from e; in every thread.
template <class F> __device__ double total(const Matrix& m, F f) {
  const int size = m.size();
  double sum = 0.0;
  for (int e = threadIdx.x * 4; e < size; e += THREADS * 4) {
    const Four x = f(e);
#pragma unroll
    for (int k = 0; k < 4; k++) sum += e + k < size ? (double)x.e[k] : 0.0;
  }
  return block_sum<THREADS>(sum);
}

// The root of the mean square of f, as `total` has it.
template <class F> __device__ float rms(const Matrix& m, F f) {
  const double sum = total(m, [&](int e) {
    Four x = f(e);
#pragma unroll
    for (int k = 0; k < 4; k++) x.e[k] *= x.e[k];
    return x;
  });
  return (float)sqrt(sum / m.size());
}

// The moments of a matrix's rows and columns, and what was made of them: a factor for each row and for each column.
struct Factored {
  float *row, *col, *whole, *by_row, *by_col;

  // Moves the moments by what f gives for an element: kept * moment + fresh * mean of f. Then by_row and by_col are made:
  // of_row(moment, the mean of the matrix's rows' moments), of_col(moment).
  template <class F, class Row, class Col>
  __device__ void advance(const Matrix& m, F f, float kept, float fresh, Row of_row, Col of_col) const {
    if (m.whole_at >= 0) {
      for (int e = threadIdx.x; e < m.size(); e += THREADS) {
        float* const own = whole + m.whole_at + e;
        *own = kept * *own + fresh * f(e);
      }
      __syncthreads();
      return;
    }
    float *const rows = row + m.row_at, *const cols = col + m.col_at;
    sum_rows(m, f, [&](int i, float sum) { rows[i] = kept * rows[i] + fresh * (sum / m.cols); });
    sum_columns(m, f, [&](int j, float sum) {
      const float moment = kept * cols[j] + fresh * (sum / m.rows);
      cols[j] = moment;
      by_col[m.col_at + j] = of_col(moment);
    });
    __syncthreads();
    const int matrices = m.batches * m.inner;
    if (matrices == 1) {
      double sum = 0.0;
      for (int i = threadIdx.x; i < m.rows; i += THREADS) sum += rows[i];
      const float mean = block_sum<THREADS>(sum) / m.rows;
      for (int i = threadIdx.x; i < m.rows; i += THREADS) by_row[m.row_at + i] = of_row(rows[i], mean);
    } else {
      for (int b = threadIdx.x; b < matrices; b += THREADS) {
        const int first = b / m.inner * m.rows * m.inner + b % m.inner;
        float sum = 0.f;
        for (int i = 0; i < m.rows; i++) sum += rows[first + i * m.inner];
        for (int i = first; i < first + m.rows * m.inner; i += m.inner)
          by_row[m.row_at + i] = of_row(rows[i], sum / m.rows);
      }
    }
    __syncthreads();
  }

  // The product of an element's factors, or of_whole(its moment).
  template <class Whole> __device__ __forceinline__ float at(const Matrix& m, int e, Whole of_whole) const {
    if (m.whole_at >= 0) return of_whole(whole[m.whole_at + e]);
    return by_row[m.row_at + m.row(e)] * by_col[m.col_at + m.col(e)];
  }

  // The same for four elements; 0 behind the last.
  template <class Whole> __device__ __forceinline__ Four four_at(const Matrix& m, int e, Whole of_whole) const {
    Four found = {0.f, 0.f, 0.f, 0.f};
    const int size = m.size();
    if (m.whole_at < 0 && m.inner == 1 && m.cols % 4 == 0) {
      const float of_row = by_row[m.row_at + m.row(e)];
      const float* const own = by_col + m.col_at + m.col(e);
#pragma unroll
      for (int k = 0; k < 4; k++) found.e[k] = of_row * own[k];
      return found;
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (e + k < size) found.e[k] = at(m, e + k, of_whole);
    return found;
  }
};

struct InverseRoot {
  __device__ __forceinline__ float operator()(float moment) const { return 1.f / sqrtf(moment); }
  __device__ __forceinline__ float operator()(float moment, float mean) const { return 1.f / sqrtf(moment / mean); }
};
