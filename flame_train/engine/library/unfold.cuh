// Patches of images as columns, and columns added up into images.
//
// Contract: images are dense (planes, h, w), columns (planes, H_KERNEL, W_KERNEL, oh, ow). A thread has WIDTH neighbours
// along the result's last dim, which WIDTH divides, and their packet is aligned. Each result is assigned by the one
// thread that has it: images gather from their columns, in a fixed order. Sums are fp32. The windows are known when this
// is compiled: H_ and W_ KERNEL, STRIDE, PADDING and DILATION. Grids are one-dimensional, with a thread for each of the
// result's `packets`.
#pragma once

constexpr int BLOCK = 256;

extern "C" __global__ void __launch_bounds__(BLOCK) unfold(
    const T* __restrict__ image, T* __restrict__ columns, const int packets, const int h, const int w, const int oh,
    const int ow) {
  const unsigned packet = blockIdx.x * BLOCK + threadIdx.x, along = ow / WIDTH;
  if (packet >= packets) return;
  unsigned rest = packet / along;
  const int x = packet % along * WIDTH * W_STRIDE - W_PADDING, y = rest % oh * H_STRIDE - H_PADDING;
  rest /= oh;
  const int left = x + (int)(rest % W_KERNEL) * W_DILATION;
  rest /= W_KERNEL;
  const int line = y + (int)(rest % H_KERNEL) * H_DILATION;
  const T* row = image + ((long long)(rest / H_KERNEL) * h + line) * w;
  float values[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    const int at = left + i * W_STRIDE;
    values[i] = line >= 0 && line < h && at >= 0 && at < w ? to_float(row[at]) : 0.f;
  }
  store<T, WIDTH>(columns + (long long)packet * WIDTH, values);
}

// The most windows over a pixel. All are asked for, so that the reads of a thread are under way together.
constexpr int H_MANY = (H_KERNEL - 1) * H_DILATION / H_STRIDE + 1, W_MANY = (W_KERNEL - 1) * W_DILATION / W_STRIDE + 1;
constexpr int TOGETHER = H_MANY * W_MANY <= 32;

extern "C" __global__ void __launch_bounds__(BLOCK) fold(
    const T* __restrict__ columns, T* __restrict__ image, const int packets, const int h, const int w, const int oh,
    const int ow) {
  const unsigned packet = blockIdx.x * BLOCK + threadIdx.x, along = w / WIDTH;
  if (packet >= packets) return;
  const unsigned rest = packet / along;
  const int x = packet % along * WIDTH + W_PADDING, y = rest % h + H_PADDING;
  const T* plane = columns + (long long)(rest / h) * H_KERNEL * W_KERNEL * oh * ow;
  float sum[WIDTH] = {};
#pragma unroll (TOGETHER ? H_MANY : 1)
  for (int n = 0; n < H_MANY; n++) {
    const int v = y / H_STRIDE - n, down = y - v * H_STRIDE;
    const bool over = v >= 0 && v < oh && down % H_DILATION == 0 && down / H_DILATION < H_KERNEL;
#pragma unroll (TOGETHER ? W_MANY : 1)
    for (int m = 0; m < W_MANY; m++)
#pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        const int u = (x + i) / W_STRIDE - m, across = x + i - u * W_STRIDE;
        const bool there = over && u >= 0 && u < ow && across % W_DILATION == 0 && across / W_DILATION < W_KERNEL;
        const int tap = down / H_DILATION * W_KERNEL + across / W_DILATION;
        const float each = to_float(plane[there ? ((long long)tap * oh + v) * ow + u : 0]);
        sum[i] += there ? each : 0.f;
      }
  }
  store<T, WIDTH>(image + (long long)packet * WIDTH, sum);
}
