// Automagic's update of one matrix: the moments, the update's size, the rates with their largest and mean, and the step.
__device__ float block_max(float v) {
  __shared__ float shared[THREADS];
  shared[threadIdx.x] = v;
  for (int half = THREADS / 2; half; half >>= 1) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  const float found = shared[0];
  __syncthreads();
  return found;
}

__device__ void update_by_rule(const FlatParameters& arena, const long long* matrices, float* by_row, float* by_col,
                               float* row, float* col, float* whole, unsigned char* rates, float* unit, bool* above,
                               double* sums) {
  typedef Packet<unsigned char, 4> Codes;
  typedef Packet<bool, 4> Signs;
  const Matrix m(matrices);
  const Factored moments = {row, col, whole, by_row, by_col};
  const ScaledGradient update{arena, m, moments};
  update.advance(BETA2, ONE_MINUS_BETA2);
  const float scale = 1.f / fmaxf(rms(m, update) / THRESHOLD, 1.f), before = unit[m.number];
  const auto rate = [&](const Four& u, int e) {
    const Codes old = *reinterpret_cast<const Codes*>(rates + m.start + e);
    const Signs were = *reinterpret_cast<const Signs*>(above + m.start + e);
    Four found;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float last = __fmul_rn((float)old.e[k], before);
      const bool same = (u.e[k] > 0.f) == were.e[k];
      found.e[k] = fminf(fmaxf(__fadd_rn(last, same ? BUMP : -BUMP), SMALLEST), LARGEST);
    }
    return found;
  };
  float most = 0.f;
  const double sum = total(m, [&](const Span<4>& at) {
    const Four found = rate(update(at), at.e);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (at.e + k < m.size()) most = fmaxf(most, found.e[k]);
    return found;
  });
  const float now_unit = (float)((double)block_max(most) / 127.0);
  over(m, [&](const Span<4>& at) {
    const long long i = m.start + at.e;
    const Four u = update(at), own = rate(u, at.e), p = four(arena.values, i), by = arena.rates(i);
    Four moved = u;
    Codes codes;
    Signs signs;
#pragma unroll
    for (int k = 0; k < 4; k++) moved.e[k] = u.e[k] * scale;
    const Four decayed = arena.decayed(moved, p, WEIGHT_DECAY, i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const bool inside = at.e + k < m.size();
      signs.e[k] = inside && u.e[k] > 0.f;
      codes.e[k] = inside ? (unsigned char)fminf(rintf(__fdiv_rn(own.e[k], now_unit)), 127.f) : (unsigned char)127;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) moved.e[k] = by.e[k] * (own.e[k] * decayed.e[k]);
    *reinterpret_cast<Codes*>(rates + i) = codes;
    *reinterpret_cast<Signs*>(above + i) = signs;
    arena.change(p, moved, i);
  });
  if (threadIdx.x == 0) {
    unit[m.number] = now_unit;
    sums[blockIdx.x] = sum / m.size();
  }
}
