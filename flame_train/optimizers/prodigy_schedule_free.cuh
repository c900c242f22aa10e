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
  const auto square = [&](const auto& at) {
    auto g = gradient_at(arena, m, at);
#pragma unroll
    for (float& x : g.e) x = x * x;
    return g;
  };
  moments.advance(m, square, BETA2, now[FRESH], root, root);
  const auto update = [&](Four g, const Span<4>& at) {
    const Four by = moments.at(m, at, root);
#pragma unroll
    for (int k = 0; k < 4; k++) g.e[k] = g.e[k] * now[D_NOW] / (by.e[k] + now[FLOOR]);
    return g;
  };
  const auto updated = [&](const Span<4>& at) { return update(gradient_at(arena, m, at), at); };
  const float scale = STABLE ? 1.f / sqrtf(fmaxf(rms(m, updated), 1.f)) : 1.f;
  double inner = 0.0, size = 0.0;
  over(m, [&](const Span<4>& at) {
    const long long i = m.start + at.e;
    const Four g = gradient_at(arena, m, at), p = four(arena.values, i), rates = arena.rates(i);
    Four u = update(g, at), fast = four(z, i), moved;
    const int j = (at.e + EVERY - 1) / EVERY, k0 = j * EVERY - at.e;  // EVERY is above 4: at most one is in the estimate
    if (k0 < 4 && at.e + k0 < m.size()) {
      float g0 = g.e[0], z0 = fast.e[0];
#pragma unroll
      for (int k = 1; k < 4; k++) g0 = k == k0 ? g.e[k] : g0, z0 = k == k0 ? fast.e[k] : z0;
      const float sum = BETA3 * s[m.extra + j] + now[IN_S] * g0;
      s[m.extra + j] = sum;
      inner += now[IN_S] * (g0 * (p0[m.extra + j] - z0));
      size += fabsf(sum);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) u.e[k] *= scale;
    u = arena.decayed(u, p, WEIGHT_DECAY, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float step = rates.e[k] * now[D_NOW];
      moved.e[k] = now[PULL] * (p.e[k] - fast.e[k]) + now[ALONG] * step * u.e[k];
      fast.e[k] -= step * u.e[k];
    }
    store<float, 4>(z + i, fast.e);
    arena.change(p, moved, i);
  });
  inner = block_sum<THREADS>(inner);
  size = block_sum<THREADS>(size);
  if (threadIdx.x == 0) sums[blockIdx.x] = inner, sums[gridDim.x + blockIdx.x] = size;
}
