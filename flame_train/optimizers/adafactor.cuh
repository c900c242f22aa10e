// Adafactor's update of one matrix: the moments, the update's size and the matrix's, and the step.
__device__ void update_by_rule(const FlatParameters& arena, const long long* matrices, float* by_row, float* by_col,
                               float* row, float* col, float* whole, float* exp_avg, double*) {
  const Matrix m(matrices);
  const Factored moments = {row, col, whole, by_row, by_col};
  const float decay = arena.now[DECAY];
  const ScaledGradient update{arena, m, moments};
  update.advance(decay, 1.f - decay);
  const float clip = fmaxf(rms(m, update) / THRESHOLD, 1.f);
  float size = SCALED ? fmaxf(rms(m, [&](const Span<4>& at) { return values_at(arena.values, m, at); }), 1e-3f) : 1.f;
  size *= arena.now[RELATIVE];
  over(m, [&](const Span<4>& at) {
    const long long i = m.start + at.e;
    const Four u = update(at), p = four(arena.values, i), rates = arena.rates(i);
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
  });
}
