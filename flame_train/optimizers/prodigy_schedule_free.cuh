// Prodigy's schedule-free update of one matrix: the moments, the update's size, the sums that d is estimated from, the step.
struct Root {
  bool tall;
  __device__ __forceinline__ float operator()(float moment, float mean) const {
    return sqrtf(tall ? moment : moment / (mean + 1e-30f));
  }
  __device__ __forceinline__ float operator()(float moment) const { return tall ? 1.f : sqrtf(moment); }
};

__device__ void update_by_rule(const FlatParameters& arena, const long long* matrices, float* by_row, float* by_col,
                               float* row, float* col, float* whole, float* z, float* p0, float* s, double* sums) {
  const Matrix m(matrices);
  const float* const now = arena.now;
  const Factored moments = {row, col, whole, by_row, by_col};
  const Root root = {m.whole_at < 0 && m.rows > m.cols};
  const auto square = [&](int e) {
    const float g = arena.gradient_at(m.start + e);
    return g * g;
  };
  moments.advance(m, square, BETA2, now[FRESH], root, root);
  const auto update = [&](int e) {
    Four u = arena.gradient(m.start + e);
    const Four by = moments.four_at(m, e, root);
#pragma unroll
    for (int k = 0; k < 4; k++) u.e[k] = u.e[k] * now[D_NOW] / (by.e[k] + now[FLOOR]);
    return u;
  };
  const float by = STABLE ? sqrtf(fmaxf(rms(m, update), 1.f)) : 1.f;
  double inner = 0.0, size = 0.0;
  for (int j = threadIdx.x; j * EVERY < m.size(); j += THREADS) {
    const long long i = m.start + j * EVERY;
    const float g = arena.gradient_at(i), moved = BETA3 * s[m.extra + j] + now[IN_S] * g;
    s[m.extra + j] = moved;
    inner += now[IN_S] * (g * (p0[m.extra + j] - z[i]));
    size += fabsf(moved);
  }
  inner = block_sum<THREADS>(inner);
  size = block_sum<THREADS>(size);
  if (threadIdx.x == 0) sums[blockIdx.x] = inner, sums[gridDim.x + blockIdx.x] = size;
  for (int e = threadIdx.x * 4; e < m.size(); e += THREADS * 4) {
    const long long i = m.start + e;
    Four u = update(e), fast = four(z, i), moved;
    const Four p = four(arena.values, i), rates = arena.rates(i);
#pragma unroll
    for (int k = 0; k < 4; k++) u.e[k] /= by;
    u = arena.decayed(u, p, WEIGHT_DECAY, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float step = rates.e[k] * now[D_NOW];
      moved.e[k] = now[PULL] * (p.e[k] - fast.e[k]) + now[ALONG] * step * u.e[k];
      fast.e[k] -= step * u.e[k];
    }
    store<float, 4>(z + i, fast.e);
    arena.change(p, moved, i);
  }
}
