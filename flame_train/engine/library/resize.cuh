// Images in another size, along up to three axes at once, and the gradient.
//
// Contract: images are dense (planes, d, h, w, inner) and (planes, od, oh, ow, inner), inner being 1 in NCHW and the
// channels in NHWC. A thread has WIDTH neighbours: where ALONG is 1, along the last axis, which inner of 1 follows;
// else along inner. WIDTH divides these, and packets are aligned. Each result is assigned by the one thread that has
// it: gradients gather, in a fixed order, from the pixels that read theirs. Arithmetic is fp32, coordinates have the
// precision of the reference. MODE is how a pixel finds its sources. DIMS axes, 1 to 3, are resized; those before have
// one pixel. ACROSS and DOWN are how many readers of a pixel along the last two are asked for at once. Grids are one-dimensional, with a thread for each of the result's `packets`; that of the tables has a row
// for each axis.
//
// Tables list the last axis first. For each pixel of the result `low` is the first of the pixels that it reads, and
// `part` its way from there to the next. For each pixel of the input `readers` are the first one that reads it and the
// one after the last.
#pragma once

enum { NEAREST, NEAREST_EXACT, LINEAR, LINEAR_ALIGNED };
constexpr int BLOCK = 256;
constexpr bool TWO = MODE >= LINEAR;  // whether a pixel reads two along an axis
typedef Packet<T, WIDTH> Elements;

// The first pixel that pixel `o` reads, of `last` + 1, and its way to the next.
__device__ __forceinline__ int source(int o, double scale, int last, float& part) {
  part = 0.f;
  if (MODE == NEAREST || MODE == NEAREST_EXACT) {
    const float at = floorf((float)o * (float)scale), middle = floorf(((float)o + 0.5f) * (float)scale);
    return (int)fminf(MODE == NEAREST ? at : middle, (float)last);
  }
  // Rounded after each operation, as NumPy does.
  const double x = MODE == LINEAR_ALIGNED ? o * scale : __dsub_rn(__dmul_rn(o + 0.5, scale), 0.5);
  const int low = x <= 0. ? 0 : x < last ? (int)x : last;
  const double way = x - low;
  part = way <= 0. ? 0.f : way < 1. ? (float)way : 1.f;
  return low;
}

extern "C" __global__ void __launch_bounds__(BLOCK) resize_tables(
    int* low, float* part, int* readers, const int w, const int ow, const double across, const int h, const int oh,
    const double down, const int d, const int od, const double deep) {
  const int axis = blockIdx.y, i = blockIdx.x * BLOCK + threadIdx.x;
  const int before = axis == 0 ? w : axis == 1 ? h : d, after = axis == 0 ? ow : axis == 1 ? oh : od;
  const double scale = axis == 0 ? across : axis == 1 ? down : deep;
  const int first = axis == 0 ? 0 : axis == 1 ? w : w + h, to = axis == 0 ? 0 : axis == 1 ? ow : ow + oh;
  float way;
  if (i < after) {
    low[to + i] = source(i, scale, before - 1, way);
    part[to + i] = way;
  }
  if (i >= before) return;
  for (int side = 0; side < 2; side++) {
    const int wanted = side ? i + 1 : i - TWO;  // the first pixel that reads this one or one behind it
    int from = 0, stop = after;
    while (from < stop) {
      const int middle = (from + stop) / 2;
      if (source(middle, scale, before - 1, way) < wanted) from = middle + 1;
      else stop = middle;
    }
    readers[2 * (first + i) + side] = from;
  }
}

// Where a thread's packet lies among images of `depth` x `height` x `width` pixels.
struct Spot {
  unsigned plane;
  int z, y, x, c;
  __device__ __forceinline__ Spot(unsigned packet, int depth, int height, int width, int inner) {
    const unsigned along = (ALONG ? width : inner) / WIDTH;
    unsigned rest = packet / along;
    c = packet % along * WIDTH, x = 0;
    if (ALONG) x = c, c = 0;
    else x = rest % width, rest /= width;
    y = 0, z = 0;
    if (DIMS > 1) y = rest % height, rest /= height;
    if (DIMS > 2) z = rest % depth, rest /= depth;
    plane = rest;
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK) resize(
    const T* __restrict__ x, T* __restrict__ y, const int* __restrict__ low, const float* __restrict__ part,
    const int packets, const int d, const int h, const int w, const int od, const int oh, const int ow,
    const int inner) {
  const int packet = blockIdx.x * BLOCK + threadIdx.x;
  if (packet >= packets) return;
  const Spot s(packet, od, oh, ow, inner);
  constexpr int EACH = ALONG ? WIDTH : 1;  // pixels of the last axis
  const Packet<int, EACH> left = *reinterpret_cast<const Packet<int, EACH>*>(low + s.x);
  Packet<float, EACH> way;
  if (TWO) way = *reinterpret_cast<const Packet<float, EACH>*>(part + s.x);
  const int top = DIMS > 1 ? low[ow + s.y] : 0, front = DIMS > 2 ? low[ow + oh + s.z] : 0;
  const float fall = TWO && DIMS > 1 ? part[ow + s.y] : 0.f, depth = TWO && DIMS > 2 ? part[ow + oh + s.z] : 0.f;
  float sum[WIDTH] = {};
#pragma unroll
  for (int k = 0; k < (TWO && DIMS > 2 ? 2 : 1); k++)
#pragma unroll
    for (int j = 0; j < (TWO && DIMS > 1 ? 2 : 1); j++) {
      const float by = (k ? depth : 1.f - depth) * (j ? fall : 1.f - fall);
      const int z = min(front + k, d - 1), line = min(top + j, h - 1);
      const T* row = x + (((long long)s.plane * d + z) * h + line) * w * inner + s.c;
      if (ALONG) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          float v = to_float(row[left.e[i]]);
          if (TWO) v = v * (1.f - way.e[i]) + to_float(row[min(left.e[i] + 1, w - 1)]) * way.e[i];
          sum[ALONG ? i : 0] += by * v;
        }
      } else {
        const Elements q = *reinterpret_cast<const Elements*>(row + (long long)left.e[0] * inner);
        const int next = TWO ? min(left.e[0] + 1, w - 1) : left.e[0];
        Elements r = q;
        if (TWO) r = *reinterpret_cast<const Elements*>(row + (long long)next * inner);
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
          sum[i] += by * (TWO ? to_float(q.e[i]) * (1.f - way.e[0]) + to_float(r.e[i]) * way.e[0] : to_float(q.e[i]));
      }
    }
  store<T, WIDTH>(y + (long long)packet * WIDTH, sum);
}

// How much of pixel `p`, of `last` + 1, goes into one that reads from `low` on.
__device__ __forceinline__ float share(int p, int last, int low, float way) {
  return (low == p ? 1.f - way : 0.f) + (min(low + 1, last) == p ? way : 0.f);
}

// Calls `use(i, true)` for each of [from, to). COUNT are asked for at once, so that what they read is under way
// together: `use(i, false)` stands for one too many. All are below `end`, which is above 0.
template <int COUNT, class Use> __device__ __forceinline__ void each_of(int from, int to, int end, const Use& use) {
#pragma unroll
  for (int n = 0; n < COUNT; n++) use(min(from + n, end - 1), from + n < to);
  for (int i = from + COUNT; i < to; i++) use(i, true);
}

extern "C" __global__ void __launch_bounds__(BLOCK) resize_gradient(
    const T* __restrict__ g, T* __restrict__ dx, const int* __restrict__ low, const float* __restrict__ part,
    const int* __restrict__ readers, const int packets, const int d, const int h, const int w, const int od,
    const int oh, const int ow, const int inner) {
  const int packet = blockIdx.x * BLOCK + threadIdx.x;
  if (packet >= packets) return;
  const Spot s(packet, d, h, w, inner);
  const int* const rows = readers + 2 * (w + s.y);
  const int* const slices = readers + 2 * (w + h + s.z);
  float sum[WIDTH] = {};
  for (int z = DIMS > 2 ? slices[0] : 0; z < (DIMS > 2 ? slices[1] : 1); z++) {
    const float deep = TWO && DIMS > 2 ? share(s.z, d - 1, low[ow + oh + z], part[ow + oh + z]) : 1.f;
    each_of<DOWN>(DIMS > 1 ? rows[0] : 0, DIMS > 1 ? rows[1] : 1, oh, [&](int y, bool below) {
      const float by = deep * (TWO && DIMS > 1 ? share(s.y, h - 1, low[ow + y], part[ow + y]) : 1.f);
      const T* row = g + (((long long)s.plane * od + z) * oh + y) * ow * inner + s.c;
#pragma unroll
      for (int i = 0; i < (ALONG ? WIDTH : 1); i++) {
        const int* const columns = readers + 2 * (s.x + i);
        each_of<ACROSS>(columns[0], columns[1], ow, [&](int x, bool beside) {
          const float each = TWO ? by * share(s.x + i, w - 1, low[x], part[x]) : 1.f;
          const bool reads = below && beside;
          if (ALONG) {
            const float v = each * to_float(row[x]);
            sum[ALONG ? i : 0] += reads ? v : 0.f;
          } else {
            const Elements q = *reinterpret_cast<const Elements*>(row + (long long)x * inner);
#pragma unroll
            for (int n = 0; n < WIDTH; n++) sum[n] += reads ? each * to_float(q.e[n]) : 0.f;
          }
        });
      }
    });
  }
  store<T, WIDTH>(dx + (long long)packet * WIDTH, sum);
}
