// AdamW's update with moments in 8 bits: a warp has a block of 256 values, a lane eight of them, which stay in registers.
// The bits are those of the reference: every operation is rounded for itself.
typedef Packet<unsigned char, 4> Codes;

// A table of 256 that a warp reads at places of its own. Without the gaps, those that a search asks for lie in one bank.
__device__ __forceinline__ int gapped(int place) { return place + place / 32; }

// The level nearest to `share`; of two at the same distance the lower.
__device__ __forceinline__ int nearest(const float* middles, float share) {
  int low = 0, high = 255;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int middle = (low + high) / 2;
    if (low >= high) continue;
    if (middles[gapped(middle)] < share) low = middle + 1;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ float warp_max(float v) {
  for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

__device__ void update_by_rule(const FlatParameters& arena, const long long* places, float* signed_levels,
                               float* unsigned_levels, unsigned char* first, float* first_max, unsigned char* second,
                               float* second_max, double*) {
  __shared__ float levels[2][264], middles[2][264];
  const float* const given[2] = {signed_levels, unsigned_levels};
  for (int i = threadIdx.x; i < 512; i += THREADS) {
    const float *own = given[i / 256] + i % 256;
    levels[i / 256][gapped(i % 256)] = own[0];
    if (i % 256 < 255) middles[i / 256][gapped(i % 256)] = __fmul_rn(__fadd_rn(own[1], own[0]), 0.5f);
  }
  __syncthreads();
  const int block = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= BLOCKS) return;
  const long long start = places[2 * block], left = places[2 * block + 1];
  const float m_max = first_max[block], v_max = second_max[block];
  float m[8], v[8];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int e = half * 128 + lane * 4;
    const Four g = e < left ? arena.gradient(start + e) : Four{0.f, 0.f, 0.f, 0.f};
    const Codes a = *reinterpret_cast<const Codes*>(first + block * 256ll + e);
    const Codes b = *reinterpret_cast<const Codes*>(second + block * 256ll + e);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float own = e + k < left ? g.e[k] : 0.f;
      const float old_m = __fmul_rn(levels[0][gapped((a.e[k] + 127) % 256)], m_max);
      const float old_v = __fmul_rn(levels[1][gapped(b.e[k])], v_max);
      m[half * 4 + k] = __fadd_rn(__fmul_rn(BETA1, old_m), __fmul_rn(ONE_MINUS_BETA1, own));
      v[half * 4 + k] = __fadd_rn(__fmul_rn(BETA2, old_v), __fmul_rn(__fmul_rn(ONE_MINUS_BETA2, own), own));
    }
  }
  float most_m = 0.f, most_v = 0.f;
#pragma unroll
  for (int k = 0; k < 8; k++) most_m = fmaxf(most_m, fabsf(m[k])), most_v = fmaxf(most_v, v[k]);
  most_m = warp_max(most_m), most_v = warp_max(most_v);
  const float by_m = most_m > 0.f ? most_m : 1.f, by_v = most_v > 0.f ? most_v : 1.f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int e = half * 128 + lane * 4;
    Codes a, b;
    Four step;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int j = half * 4 + k;
      a.e[k] = (unsigned char)(nearest(middles[0], __fdiv_rn(m[j], by_m)) + 129);
      b.e[k] = (unsigned char)nearest(middles[1], __fdiv_rn(v[j], by_v));
      const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v[j]), arena.now[SECOND]), EPS);
      step.e[k] = __fdiv_rn(__fdiv_rn(m[j], arena.now[FIRST]), root);
    }
    *reinterpret_cast<Codes*>(first + block * 256ll + e) = a;
    *reinterpret_cast<Codes*>(second + block * 256ll + e) = b;
    if (e >= left) continue;
    const Four p = four(arena.values, start + e);
    arena.move(p, arena.decayed(step, p, WEIGHT_DECAY, start + e), start + e);
  }
  if (lane == 0) first_max[block] = most_m, second_max[block] = most_v;
}
