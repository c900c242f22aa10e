// Weights of 4 bits, blocks of 64, doubly quantized; see nf4.py, which puts the tables NORMAL, NORMAL_MIDDLES, DYNAMIC
// and DYNAMIC_MIDDLES before this text.
//
// Contract: arrays are dense and begin at multiples of 16 bytes. Elements are whole blocks where they are encoded, whole
// packets of 8 where they are decoded. Every operation is rounded by itself, so that all devices give the same bits.
#pragma once

typedef unsigned char byte;

__device__ __forceinline__ float nf4_scaled(float x, float largest) {
  return __fmul_rn(x, __fdiv_rn(1.f, fmaxf(largest, 1.17549435e-38f)));
}

// Blocks of 64 by a warp each, two elements a lane: the bytes, and the largest magnitude of each block.
extern "C" __global__ void __launch_bounds__(256)
    nf4_encode(const T* __restrict__ x, byte* __restrict__ data, float* __restrict__ largest, const int blocks) {
  const int block = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
  const bool inside = block < blocks;
  const long long at = (long long)(inside ? block : 0) * 64 + lane * 2;
  const float first = to_float(x[at]), second = to_float(x[at + 1]);
  const float most = of_all<Max, 32>(larger(fabsf(first), fabsf(second)), nullptr);
  const float a = nf4_scaled(first, most), b = nf4_scaled(second, most);
  int high = 0, low = 0;
#pragma unroll
  for (int i = 0; i < 15; i++) {
    high += a > NORMAL_MIDDLES[i];
    low += b > NORMAL_MIDDLES[i];
  }
  if (!inside) return;
  data[at / 2] = (byte)(high << 4 | low);
  if (lane == 0) largest[block] = most;
}

// The mean of the magnitudes, summed in fp64 by one block.
extern "C" __global__ void __launch_bounds__(256)
    nf4_mean(const float* __restrict__ largest, float* __restrict__ offset, const int blocks) {
  __shared__ double sums[256];
  double sum = 0.0;
  for (int i = threadIdx.x; i < blocks; i += 256) sum += (double)largest[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int o = 128; o; o >>= 1) {
    if (threadIdx.x < o) sums[threadIdx.x] += sums[threadIdx.x + o];
    __syncthreads();
  }
  if (threadIdx.x == 0) *offset = (float)(sums[0] / blocks);
}

// Magnitudes less their mean, 256 of them by a block: their places in DYNAMIC, and the largest magnitude of all.
extern "C" __global__ void __launch_bounds__(256)
    nf4_nest(const float* __restrict__ largest, const float* __restrict__ offset, byte* __restrict__ absmax,
             float* __restrict__ nested, const int blocks) {
  __shared__ float shared[32];
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float x = i < blocks ? __fsub_rn(largest[i], *offset) : 0.f;
  const float most = of_all<Max, 256>(fabsf(x), shared), y = nf4_scaled(x, most);
  int place = 0;
#pragma unroll
  for (int step = 128; step; step >>= 1)
    if (place + step <= 255 && y > DYNAMIC_MIDDLES[place + step - 1]) place += step;
  if (i < blocks) absmax[i] = (byte)place;
  if (threadIdx.x == 0) nested[blockIdx.x] = most;
}

// Eight elements a thread.
extern "C" __global__ void __launch_bounds__(256)
    nf4_decode(const byte* __restrict__ data, const byte* __restrict__ absmax, const float* __restrict__ nested,
               const float* __restrict__ offset, T* __restrict__ out, const int packets) {
  const int p = blockIdx.x * 256 + threadIdx.x;
  if (p >= packets) return;
  const unsigned eight = reinterpret_cast<const unsigned*>(data)[p];
  const int block = p / 8;
  const float most = __fadd_rn(__fmul_rn(DYNAMIC[absmax[block]], nested[block / 256]), *offset);
  float f[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const unsigned code = eight >> (i / 2 * 8 + (i & 1 ? 0 : 4)) & 15u;
    f[i] = __fmul_rn(NORMAL[code], most);
  }
  store<T, 8>(out + (long long)p * 8, f);
}
