// CAME's update of one matrix: the moments, the update's size, the moments of its distance from the momentum, and the step.
__device__ void update_by_rule(const FlatParameters& arena, const long long* matrices, float* by_row, float* by_col,
                               float* res_by_row, float* res_by_col, float* row, float* col, float* whole,
                               float* res_row, float* res_col, float*, float* exp_avg, double*) {
  const Matrix m(matrices);
  const Factored moments = {row, col, whole, by_row, by_col};
  const Factored confidence = {res_row, res_col, nullptr, res_by_row, res_by_col};
  const InverseRoot inverse;
  const ScaledGradient update{arena, m, moments};
  update.advance(BETA2, ONE_MINUS_BETA2);
  const float scale = 1.f / fmaxf(rms(m, update) / THRESHOLD, 1.f);
  // The momentum as it becomes, from the update at a span, which is scaled. It is written last, being read twice.
  const auto momentum = [&](auto& u, const auto& at) {
    auto own = values_at(exp_avg, m, at);
#pragma unroll
    for (int k = 0; k < at.N; k++) u.e[k] *= scale, own.e[k] = BETA1 * own.e[k] + ONE_MINUS_BETA1 * u.e[k];
    return own;
  };
  const bool matrix = m.whole_at < 0;
  if (matrix) {
    const auto residual = [&](const auto& at) {
      auto u = update(at);
      const auto own = momentum(u, at);
#pragma unroll
      for (int k = 0; k < at.N; k++) u.e[k] = (u.e[k] - own.e[k]) * (u.e[k] - own.e[k]) + 1e-16f;
      return u;
    };
    confidence.advance(m, residual, BETA3, ONE_MINUS_BETA3, inverse, inverse);
  }
  over(m, [&](const Span<4>& at) {
    const long long i = m.start + at.e;
    Four u = update(at), step = momentum(u, at);
    const Four p = four(arena.values, i), by = matrix ? confidence.at(m, at, inverse) : Four{1.f, 1.f, 1.f, 1.f};
    store<float, 4>(exp_avg + i, step.e);
#pragma unroll
    for (int k = 0; k < 4; k++) step.e[k] *= by.e[k];
    arena.move(p, arena.decayed(step, p, WEIGHT_DECAY, i), i);
  });
}
