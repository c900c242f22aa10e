// Pooling of images and its gradients.
//
// Contract: images are dense (planes, h, w, inner), inner being 1 in NCHW and the channels in NHWC; results of pooling
// (planes, oh, ow, inner). A thread has WIDTH neighbours along inner, which WIDTH divides, and their packets are
// aligned. An output is assigned by the one thread that has it: gradients gather from the windows over a pixel, in a
// fixed order. Sums are fp32. Indices count an image's pixels along rows. The windows are known when this is compiled:
// H_ and W_ KERNEL, STRIDE, PADDING, DILATION and REACH, the padding that a mean counts. A KERNEL of 0 stands for bins
// that cover the image evenly. For these the sizes are known, too, H_ and W_ SIZE and OUT and INNER. A thread divides
// by each of them, and divisions by a constant take a fifth of the time. They are 0 where only the arguments say
// them. Grids are one-dimensional, with a thread for each of the result's `packets`.
#pragma once

constexpr int BLOCK = 256;

// a * b / c; a division of 64 bits takes some five times as long as one of 32.
__device__ __forceinline__ int scaled(int a, int b, int c) {
  const unsigned long long product = (unsigned long long)a * b;
  return product >> 32 ? product / c : (unsigned)product / (unsigned)c;
}

// One dim of the windows.
template <int KERNEL, int STRIDE, int PADDING, int DILATION, int REACH, int SIZE, int OUT> struct Axis {
  int size, out;
  __device__ __forceinline__ Axis(int size, int out) : size(SIZE ? SIZE : size), out(OUT ? OUT : out) {}
  // a * b / c where a and b are at most as large as the sizes.
  static __device__ __forceinline__ int part(int a, int b, int c) {
    if (SIZE && SIZE < 32768 && OUT < 32768) return (unsigned)(a * b) / (unsigned)c;
    return scaled(a, b, c);
  }
  __device__ __forceinline__ int start(int o) const {
    return KERNEL ? o * STRIDE - PADDING : part(o, size, out);
  }
  __device__ __forceinline__ int stop(int o) const {
    return KERNEL ? o * STRIDE - PADDING + KERNEL : size - part(out - 1 - o, size, out);
  }
  // What of window `o` lies in the image, and what a mean divides by.
  __device__ __forceinline__ int from(int o) const { return max(start(o), 0); }
  __device__ __forceinline__ int to(int o) const { return min(stop(o), size); }
  __device__ __forceinline__ int count(int o) const { return min(stop(o), size + REACH) - max(start(o), -REACH); }
  // The first window over pixel p, and the one after the last.
  __device__ __forceinline__ int first(int p) const {
    if (!KERNEL) return part(p, out, size);
    const int beyond = p + PADDING - (KERNEL - 1) * DILATION;
    return beyond > 0 ? (beyond + STRIDE - 1) / STRIDE : 0;
  }
  __device__ __forceinline__ int last(int p) const {
    return KERNEL ? min((p + PADDING) / STRIDE + 1, out) : out - part(size - 1 - p, out, size);
  }
};

typedef Axis<H_KERNEL, H_STRIDE, H_PADDING, H_DILATION, H_REACH, H_SIZE, H_OUT> Down;
typedef Axis<W_KERNEL, W_STRIDE, W_PADDING, W_DILATION, W_REACH, W_SIZE, W_OUT> Across;
typedef Packet<T, WIDTH> Elements;
typedef Packet<long long, WIDTH> Places;

// The images (planes, h, w, inner) and the results (planes, oh, ow, inner) of a pooling, and its windows.
struct Images {
  Down down;
  Across across;
  int h, w, oh, ow, inner;
  __device__ __forceinline__ Images(int h, int w, int oh, int ow, int inner)
      : down(h, oh), across(w, ow), h(down.size), w(across.size), oh(down.out), ow(across.out),
        inner(INNER ? INNER : inner) {}
  // The number of windows' elements that a mean counts.
  __device__ __forceinline__ float count(int y, int x) const { return (float)(down.count(y) * across.count(x)); }
};

// Where this thread's packet lies in an image of `height` by `width` pixels, and where others of its plane and channels
// do. One that is not `live` has none.
struct Spot {
  unsigned packet;
  int plane, y, x, c, inner;
  bool live;
  __device__ __forceinline__ Spot(int packets, int height, int width, int inner)
      : packet(blockIdx.x * BLOCK + threadIdx.x), inner(inner), live(packet < packets) {
    const unsigned along = inner / WIDTH;
    unsigned rest = packet / along;
    c = packet % along * WIDTH;
    x = rest % width, rest /= width;
    y = rest % height, plane = rest / height;
  }
  __device__ __forceinline__ long long at(int y, int x, int height, int width) const {
    return (((long long)plane * height + y) * width + x) * inner + c;
  }
  __device__ __forceinline__ void assign(T* result, const float (&values)[WIDTH]) const {
    store<T, WIDTH>(result + (long long)packet * WIDTH, values);
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK) max_pool(
    const T* x, T* y, long long* index, const int packets, const int h, const int w, const int oh, const int ow,
    const int inner) {
  const Images of(h, w, oh, ow, inner);
  const Spot s(packets, of.oh, of.ow, of.inner);
  if (!s.live) return;
  float best[WIDTH];
  Places at;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) best[i] = -INFINITE, at.e[i] = -1;
  for (int ky = 0; ky < H_KERNEL; ky++)
    for (int kx = 0; kx < W_KERNEL; kx++) {
      const int py = of.down.start(s.y) + ky * H_DILATION, px = of.across.start(s.x) + kx * W_DILATION;
      if (py < 0 || py >= h || px < 0 || px >= w) continue;
      const Elements q = *reinterpret_cast<const Elements*>(x + s.at(py, px, h, w));
#pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        const float v = to_float(q.e[i]);
        if (v > best[i] || at.e[i] < 0 || v != v) best[i] = v, at.e[i] = (long long)py * w + px;
      }
    }
  s.assign(y, best);
  *reinterpret_cast<Places*>(index + (long long)s.packet * WIDTH) = at;
}

// The mean's divisor is `divisor` unless that is 0.
extern "C" __global__ void __launch_bounds__(BLOCK) avg_pool(
    const T* x, T* y, const int packets, const int h, const int w, const int oh, const int ow, const int inner,
    const float divisor) {
  const Images of(h, w, oh, ow, inner);
  const Spot s(packets, of.oh, of.ow, of.inner);
  if (!s.live) return;
  float sum[WIDTH] = {};
  for (int py = of.down.from(s.y); py < of.down.to(s.y); py++)
    for (int px = of.across.from(s.x); px < of.across.to(s.x); px++) {
      const Elements q = *reinterpret_cast<const Elements*>(x + s.at(py, px, h, w));
#pragma unroll
      for (int i = 0; i < WIDTH; i++) sum[i] += to_float(q.e[i]);
    }
  const float by = divisor != 0.f ? divisor : of.count(s.y, s.x);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) sum[i] /= by;
  s.assign(y, sum);
}

// Assigns the gradient of pixel `s`: the sums of what `add(sum, q, y, x, at)` adds for the windows (y, x) over it. The
// packet q of their gradients lies at `at`.
template <class Add>
__device__ __forceinline__ void gather(const Images& of, const Spot& s, const T* g, T* dx, const Add& add) {
  if (!s.live) return;
  float sum[WIDTH] = {};
  for (int y = of.down.first(s.y); y < of.down.last(s.y); y++)
    for (int x = of.across.first(s.x); x < of.across.last(s.x); x++) {
      const long long at = s.at(y, x, of.oh, of.ow);
      add(sum, *reinterpret_cast<const Elements*>(g + at), y, x, at);
    }
  s.assign(dx, sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK) max_pool_gradient(
    const T* g, const long long* index, T* dx, const int packets, const int h, const int w, const int oh, const int ow,
    const int inner) {
  const Spot s(packets, h, w, inner);
  gather({h, w, oh, ow, inner}, s, g, dx, [&](float (&sum)[WIDTH], const Elements& q, int, int, long long window) {
    const Places at = *reinterpret_cast<const Places*>(index + window);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (at.e[i] == (long long)s.y * w + s.x) sum[i] += to_float(q.e[i]);
  });
}

extern "C" __global__ void __launch_bounds__(BLOCK) avg_pool_gradient(
    const T* g, T* dx, const int packets, const int h, const int w, const int oh, const int ow, const int inner,
    const float divisor) {
  const Images of(h, w, oh, ow, inner);
  const Spot s(packets, of.h, of.w, of.inner);
  gather(of, s, g, dx, [&](float (&sum)[WIDTH], const Elements& q, int y, int x, long long) {
    const float part = 1.f / (divisor != 0.f ? divisor : of.count(y, x));
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum[i] += to_float(q.e[i]) * part;
  });
}

// The gradient of the means of whole images of `H_SIZE` by `W_SIZE` pixels in NCHW: packets go on from plane to plane.
extern "C" __global__ void __launch_bounds__(BLOCK) image_mean_gradient(const T* g, T* dx, const int packets) {
  const int packet = blockIdx.x * BLOCK + threadIdx.x;
  if (packet >= packets) return;
  constexpr int PIXELS = H_SIZE * W_SIZE > 0 ? H_SIZE * W_SIZE : 1;
  float values[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) values[i] = to_float(g[(packet * WIDTH + i) / (unsigned)PIXELS]) / (float)PIXELS;
  store<T, WIDTH>(dx + (long long)packet * WIDTH, values);
}
