"""Pooling of images: the mean or the largest value of each window, in NCHW or NHWC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import ShapeError
from ..backend.cuda.codegen.kernel_ir import Reduction
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, DType, int64
from ..namespace import Namespace
from ..op import ErrorSample, composite, primitive, sample
from ..ops.common.dims import Shape
from ..ops.common.row_kernels import reduce
from ..ops.conv.geometry import Pair, from_nhwc, image_size, to_nhwc
from ..tensors.tensor import Tensor
from .pooling_kernels import Pooling, PoolKernels, Window, no_kernel


@dataclass(frozen=True, slots=True)
class MaxPool(Pooling):
    """The arguments of max_pool2d but for its input."""

    dilation: Pair

    def window(self, shape: Shape) -> Window:
        return Window.over("max_pool2d", shape, self, self.dilation)


@dataclass(frozen=True, slots=True)
class AvgPool(Pooling):
    """The arguments of avg_pool2d but for its input."""

    count_include_pad: bool
    divisor_override: int | None

    def window(self, shape: Shape) -> Window:
        if self.divisor_override == 0:
            raise ShapeError("avg_pool2d: expected a divisor_override other than 0")
        return Window.over("avg_pool2d", shape, self)

    def divisor(self, xp: Namespace, window: Window, dtype: DType) -> Array:
        """Returns what each window's sum is divided by, (oh, ow, 1)."""
        if self.divisor_override is not None:
            return xp.full((1, 1, 1), self.divisor_override, dtype)
        counts = []
        for i in (0, 1):
            start = xp.arange(window.out[i]) * window.stride[i] - window.padding[i]
            reach = window.padding[i] if self.count_include_pad else 0
            stop = xp.minimum(start + window.kernel[i], window.size[i] + reach)
            counts.append(stop - xp.maximum(start, -reach))
        return (counts[0][:, None] * counts[1])[..., None].astype(dtype)


@primitive(torch="nn.functional.max_pool2d_with_indices", multiple=True, aux=("index",))
def max_pool2d_with_indices(
    xp: Namespace,
    input: Array,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    layout: str = "NCHW",
) -> tuple[tuple[Array, Array], Array]:
    """The largest value in each window, and its place in the image counted along rows

    Args:
        input: (B, C, H, W), or (B, H, W, C) in NHWC; without B the result has none.
        kernel_size: the window's height and width, or one number for both.
        stride: pixels between windows; None: the window's size.
        padding: pixels around the image.
        dilation: pixels between the kernel's elements.
        ceil_mode: whether a window that begins inside and ends outside counts.
        layout: "NCHW" or "NHWC".

    Returns:
        The values and the indices, int64, (B, C, oh, ow) or (B, oh, ow, C); and the indices again.
    """
    window = MaxPool(kernel_size, stride, padding, ceil_mode, layout, dilation).window(input.shape)
    padded = window.padded(xp, to_nhwc(input, layout), -math.inf)
    shape = (padded.shape[0], *window.out, padded.shape[3])
    best, at = xp.full(shape, -math.inf, padded.dtype), xp.full(shape, -1, "int64")
    for i, j, rows, columns in window.taps():
        value, (pixel, inside) = padded[:, rows, columns], window.pixel(xp, i, j)
        better = inside & ((value > best) | (at < 0) | xp.isnan(value))
        best, at = xp.where(better, value, best), xp.where(better, pixel, at)
    out, index = from_nhwc(xp, best, layout), from_nhwc(xp, at, layout)
    return (out, index), index


@max_pool2d_with_indices.vjp("input")
def _(xp: Namespace, g: tuple[Array, Array], input_shape: Shape, index: Array, pool: MaxPool) -> Array:
    window = pool.window(input_shape)
    grad, at = to_nhwc(g[0], pool.layout), to_nhwc(index, pool.layout)

    def part(i: int, j: int) -> Array:
        pixel, inside = window.pixel(xp, i, j)
        return xp.where(inside & (at == pixel), grad, 0.0)

    return from_nhwc(xp, window.scattered(xp, grad, part), pool.layout)


max_pool2d_with_indices.samples(
    sample((2, 3, 4, 6), 2),
    sample((1, 2, 5, 5), 3, 2, 1),
    sample((1, 2, 5, 6), (2, 3), (2, 1), (1, 0), (2, 1), True),
    sample((2, 5, 4, 3), 2, 2, ceil_mode=True, layout="NHWC"),
)

max_pool2d_with_indices.batched_dims = 4

max_pool2d_with_indices.errors(
    ErrorSample(sample((1, 2, 4, 4), 2, 2, 2), ShapeError, "at most half of the kernel"),
    ErrorSample(sample((1, 2, 4, 4), 5), ShapeError, "does not fit into"),
    ErrorSample(sample((4, 4), 2), ShapeError, "expected a 4-D input"),
)


@composite(torch="nn.functional.max_pool2d")
def max_pool2d(
    input: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    layout: str = "NCHW",
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest value in each window; with return_indices also its place in the image counted along rows

    Args:
        input, kernel_size, stride, padding, dilation, ceil_mode, layout: as in `max_pool2d_with_indices`.
        return_indices: whether to return the indices, too.

    Returns:
        The values (B, C, oh, ow) or (B, oh, ow, C), or these and their indices, int64.
    """
    both = max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode, layout)
    return both if return_indices else both[0]


max_pool2d.errors(ErrorSample(sample((4, 4), 2), ShapeError, "max_pool2d: expected a 4-D input"))

max_pool2d.samples(sample((2, 3, 4, 6), 2), sample((1, 5, 5, 2), 3, 2, 1, return_indices=True, layout="NHWC"))


@primitive(torch="nn.functional.avg_pool2d")
def avg_pool2d(
    xp: Namespace,
    input: Array,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    layout: str = "NCHW",
) -> Array:
    """The mean of each window; the zeros of the padding count unless count_include_pad is False

    Args:
        input, kernel_size, stride, padding, ceil_mode, layout: as in `max_pool2d_with_indices`.
        count_include_pad: whether padding counts.
        divisor_override: what sums are divided by in place of their count.

    Returns:
        (B, C, oh, ow), or (B, oh, ow, C).
    """
    pool = AvgPool(kernel_size, stride, padding, ceil_mode, layout, count_include_pad, divisor_override)
    window = pool.window(input.shape)
    padded = window.padded(xp, to_nhwc(input, layout), 0.0)
    total = 0.0
    for _, _, rows, columns in window.taps():
        total = total + padded[:, rows, columns]
    return from_nhwc(xp, total / pool.divisor(xp, window, input.dtype), layout)


@avg_pool2d.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, pool: AvgPool) -> Array:
    window = pool.window(input_shape)
    share = to_nhwc(g, pool.layout) / pool.divisor(xp, window, g.dtype)
    return from_nhwc(xp, window.scattered(xp, share, lambda i, j: share), pool.layout)


avg_pool2d.samples(
    sample((2, 3, 4, 6), 2),
    sample((1, 2, 5, 5), 3, 2, 1),
    sample((1, 2, 5, 6), (2, 3), (2, 2), (1, 0), True, False),
    sample((1, 2, 4, 5), 2, 2, 1, True),
    sample((1, 2, 4, 4), 2, divisor_override=3),
    sample((2, 5, 4, 3), 2, 2, ceil_mode=True, layout="NHWC"),
)

avg_pool2d.errors(
    ErrorSample(sample((1, 2, 4, 4), 2, 2, 2), ShapeError, "avg_pool2d: padding .* at most half of the kernel"),
    ErrorSample(sample((1, 2, 4, 4), 2, 0), ShapeError, "of at least 1, got .2, 2., .0, 0., 1"),
    ErrorSample(sample((1, 2, 4, 4), 2, divisor_override=0), ShapeError, "other than 0"),
    ErrorSample(sample((1, 2, 4, 4), 2, 1, -1), ShapeError, "padding .-1, -1. must be at least 0"),
)


def _kernels(pool: MaxPool | AvgPool, shape: Shape) -> PoolKernels:
    window = pool.window(shape)
    reach = window.padding if isinstance(pool, AvgPool) and pool.count_include_pad else (0, 0)
    return PoolKernels.sliding(window, shape, pool.layout, reach)


@max_pool2d_with_indices.cuda("flame", when=no_kernel)
def _(k: Launcher, input: Array, pool: MaxPool) -> tuple[tuple[Array, Array], Array]:
    kernels = _kernels(pool, input.shape)
    made = k.empty(kernels.pooled, input.dtype), k.empty(kernels.pooled, int64)
    kernels.launch(k, "max_pool", (input,), made)
    return made, made[1]


@max_pool2d_with_indices.cuda_vjp("flame", "input", when=no_kernel)
def _(k: Launcher, g: tuple[Array, Array], input_shape: Shape, index: Array, pool: MaxPool) -> Array:
    dx = k.empty(input_shape, g[0].dtype)
    _kernels(pool, input_shape).launch(k, "max_pool_gradient", (g[0], index), (dx,))
    return dx


@avg_pool2d.cuda("flame", when=no_kernel)
def _(k: Launcher, input: Array, pool: AvgPool) -> Array:
    kernels = _kernels(pool, input.shape)
    y = k.empty(kernels.pooled, input.dtype)
    kernels.launch(k, "avg_pool", (input,), (y,), np.float32(pool.divisor_override or 0))
    return y


@avg_pool2d.cuda_vjp("flame", "input", when=no_kernel)
def _(k: Launcher, g: Array, input_shape: Shape, pool: AvgPool) -> Array:
    dx = k.empty(input_shape, g.dtype)
    divisor = np.float32(pool.divisor_override or 0)
    _kernels(pool, input_shape).launch(k, "avg_pool_gradient", (g,), (dx,), divisor)
    return dx


for _op in (max_pool2d_with_indices, avg_pool2d):
    _op.perf_samples(sample((2, 9, 11, 24), 3, 2, 1, layout="NHWC"), sample((3, 5, 31, 40), 3, 2, 1))

avg_pool2d.batched_dims = 4

Sizes = int | tuple[int | None, int | None]
"""An adaptive pooling's output: one size for both dims, or one each; None keeps the image's."""


@primitive(torch="nn.functional.adaptive_avg_pool2d")
def adaptive_avg_pool2d(xp: Namespace, input: Array, output_size: Sizes, layout: str = "NCHW") -> Array:
    """The means of output_size windows that cover the image evenly; None keeps a size"""
    x = to_nhwc(_four(input), layout)
    for axis, bins in zip((1, 2), _bins(x.shape[1:3], output_size), strict=True):
        parts = [xp.mean(x[(slice(None),) * axis + (slice(a, b),)], axis=axis) for a, b in bins]
        x = xp.stack(parts, axis=axis) if parts else x[(slice(None),) * axis + (slice(0, 0),)]
    return from_nhwc(xp, x, layout)


def _four(x: Array) -> Array:
    if x.ndim != 4:
        raise ShapeError(f"adaptive_avg_pool2d: expected a 4-D input, got {tuple(x.shape)}")
    return x


def _bins(size: tuple[int, ...], output_size: Sizes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the pixels [start, stop) of each output row, and of each column."""
    wanted = (output_size, output_size) if isinstance(output_size, int) else output_size
    if (
        not isinstance(wanted, (tuple, list))
        or len(wanted) != 2
        or any(k is not None and (not isinstance(k, int) or k < 0) for k in wanted)
    ):
        raise ShapeError(f"adaptive_avg_pool2d: expected one size of at least 0 or two, got {output_size!r}")
    counts = [n if k is None else k for n, k in zip(size, wanted, strict=True)]
    h, w = ([(i * n // k, -(-(i + 1) * n // k)) for i in range(k)] for n, k in zip(size, counts, strict=True))
    return h, w


@adaptive_avg_pool2d.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, output_size: Sizes, layout: str) -> Array:
    g = to_nhwc(g, layout)
    size = image_size(input_shape, layout)
    for axis, bins in zip((1, 2), _bins(size, output_size), strict=True):
        before = (slice(None),) * axis
        dx = xp.zeros((*g.shape[:axis], size[axis - 1], *g.shape[axis + 1 :]), g.dtype)
        for i, (a, b) in enumerate(bins):
            dx[(*before, slice(a, b))] += g[(*before, slice(i, i + 1))] / (b - a)
        g = dx
    return from_nhwc(xp, g, layout)


adaptive_avg_pool2d.samples(
    sample((2, 3, 4, 6), 1),
    sample((1, 2, 5, 7), (3, 4)),
    sample((1, 2, 3, 4), (5, None)),
    sample((2, 5, 4, 3), (2, 3), layout="NHWC"),
)


def _adaptive_avg_pool2d_errors() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 4), 2), ShapeError, "expected a 4-D input")
    for refused in (-1, (2,), (1, 2, 3), 2.5):
        yield ErrorSample(sample((1, 2, 4, 4), refused), ShapeError, "one size of at least 0 or two, got")


adaptive_avg_pool2d.errors(*_adaptive_avg_pool2d_errors())


def _no_bins(input: Array, output_size: Sizes) -> str:
    wanted = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    return "an empty result" if 0 in wanted else no_kernel(input)


def _mean_kernels(shape: Shape, output_size: Sizes, layout: str) -> PoolKernels:
    rows, columns = _bins(image_size(shape, layout), output_size)
    return PoolKernels.even((len(rows), len(columns)), shape, layout)


@adaptive_avg_pool2d.cuda("flame", when=_no_bins)
def _(k: Launcher, input: Array, output_size: Sizes, layout: str) -> Array:
    kernels = _mean_kernels(_four(input).shape, output_size, layout)
    if kernels.out == (1, 1):
        whole = (2, 3) if layout == "NCHW" else (1, 2)
        return reduce(k, Reduction("sum", "input", "total / n"), {"input": input}, whole, input.dtype)
    y = k.empty(kernels.pooled, input.dtype)
    kernels.launch(k, "avg_pool", (input,), (y,), np.float32(0))
    return y


@adaptive_avg_pool2d.cuda_vjp("flame", "input", when=_no_bins)
def _(k: Launcher, g: Array, input_shape: Shape, output_size: Sizes, layout: str) -> Array:
    dx, kernels = k.empty(input_shape, g.dtype), _mean_kernels(input_shape, output_size, layout)
    if kernels.out == (1, 1) and layout == "NCHW":
        kernels.launch_whole(k, g, dx)
        return dx
    if kernels.out == (1, 1):
        k.elementwise(("g / count",), {"g": g, "count": dx.size // g.size}, (g.dtype,), input_shape, (dx,))
        return dx
    kernels.launch(k, "avg_pool_gradient", (g,), (dx,), np.float32(0))
    return dx


adaptive_avg_pool2d.perf_samples(
    sample((2, 9, 11, 24), (4, 3), layout="NHWC"), sample((2, 3, 70, 50), 1), sample((9, 21, 7, 7), 1)
)

adaptive_avg_pool2d.batched_dims = 4
