// CAME's update of one matrix: the moments, the update's size, the moments of its distance from the momentum, and the step.
__device__ void update_by_rule(const FlatParameters& arena, const long long* matrices, float* by_row, float* by_col,
                               float* res_by_row, float* res_by_col, float* row, float* col, float* whole,
                               float* res_row, float* res_col, float*, float* exp_avg, double*) {
  const Matrix m(matrices);
  const Factored moments = {row, col, whole, by_row, by_col};
  const Factored confidence = {res_row, res_col, nullptr, res_by_row, res_by_col};
  const InverseRoot inverse;
  const auto square = [&](int e) {
    const float g = arena.gradient_at(m.start + e);
    return g * g + 1e-30f;
  };
  moments.advance(m, square, BETA2, FRESH2, inverse, inverse);
  const auto update = [&](int e) {
    Four u = arena.gradient(m.start + e);
    const Four by = moments.four_at(m, e, inverse);
#pragma unroll
    for (int k = 0; k < 4; k++) u.e[k] *= by.e[k];
    return u;
  };
  const float clip = fmaxf(rms(m, update) / THRESHOLD, 1.f);
  // The momentum is written now, because the factors that make it are needed for others.
  for (int e = threadIdx.x * 4; e < m.size(); e += THREADS * 4) {
    const Four u = update(e);
    Four own = four(exp_avg, m.start + e);
#pragma unroll
    for (int k = 0; k < 4; k++) own.e[k] = BETA1 * own.e[k] + FRESH1 * (u.e[k] / clip);
    store<float, 4>(exp_avg + m.start + e, own.e);
  }
  __syncthreads();
  const bool matrix = m.whole_at < 0;
  if (matrix) {
    const auto residual = [&](int e) {
      const float u = arena.gradient_at(m.start + e) * moments.at(m, e, inverse) / clip;
      const float off = u - exp_avg[m.start + e];
      return off * off + 1e-16f;
    };
    confidence.advance(m, residual, BETA3, FRESH3, inverse, inverse);
  }
  for (int e = threadIdx.x * 4; e < m.size(); e += THREADS * 4) {
    const long long i = m.start + e;
    Four step = four(exp_avg, i);
    const Four p = four(arena.values, i);
    if (matrix) {
      const Four by = confidence.four_at(m, e, inverse);
#pragma unroll
      for (int k = 0; k < 4; k++) step.e[k] *= by.e[k];
    }
    arena.move(p, arena.decayed(step, p, WEIGHT_DECAY, i), i);
  }
}
