// Adafactor's update of one matrix: the moments, the update's size and the matrix's, and the step.
__device__ void update_by_rule(const FlatParameters& arena, const long long* matrices, float* by_row, float* by_col,
                               float* row, float* col, float* whole, float* exp_avg, double*) {
  const Matrix m(matrices);
  const Factored moments = {row, col, whole, by_row, by_col};
  const InverseRoot inverse;
  const float decay = arena.now[DECAY];
  const auto square = [&](int e) {
    const float g = arena.gradient_at(m.start + e);
    return g * g + 1e-30f;
  };
  moments.advance(m, square, decay, 1.f - decay, inverse, inverse);
  const auto update = [&](int e) {
    Four u = arena.gradient(m.start + e);
    const Four by = moments.four_at(m, e, inverse);
#pragma unroll
    for (int k = 0; k < 4; k++) u.e[k] *= by.e[k];
    return u;
  };
  const float clip = fmaxf(rms(m, update) / THRESHOLD, 1.f);
  float size = SCALED ? fmaxf(rms(m, [&](int e) { return four(arena.values, m.start + e); }), 1e-3f) : 1.f;
  size *= arena.now[RELATIVE];
  for (int e = threadIdx.x * 4; e < m.size(); e += THREADS * 4) {
    const long long i = m.start + e;
    const Four u = update(e), p = four(arena.values, i), rates = arena.rates(i);
    Four moved, decayed = arena.decayed({0.f, 0.f, 0.f, 0.f}, p, WEIGHT_DECAY, i);
#pragma unroll
    for (int k = 0; k < 4; k++) moved.e[k] = rates.e[k] * size * (u.e[k] / clip);
    if constexpr (BETA1 != 0.f) {
      const Four before = four(exp_avg, i);
#pragma unroll
      for (int k = 0; k < 4; k++) moved.e[k] = BETA1 * before.e[k] + (1.f - BETA1) * moved.e[k];
      store<float, 4>(exp_avg + i, moved.e);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) moved.e[k] += decayed.e[k] * (rates.e[k] * size);
    arena.change(p, moved, i);
  }
}
