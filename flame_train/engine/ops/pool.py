"""Pooling of images, in NCHW or NHWC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..tensor import Tensor
from .conv import Pair, from_nhwc, pair, to_nhwc
from .dims import Shape


@dataclass(frozen=True, slots=True)
class _Window:
    """A sliding window over an image of `size` pixels: what it covers and how often."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool

    @classmethod
    def over(
        cls, op: str, shape: Shape, kernel: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil: bool,
        layout: str,
    ) -> _Window:  # fmt: skip
        """The window over an input of `shape`; raises ShapeError for one that does not fit."""
        if len(shape) != 4:
            raise ShapeError(f"{op}: expected a 4-D input in {layout}, got {tuple(shape)}")
        size = (shape[2], shape[3]) if layout == "NCHW" else (shape[1], shape[2])
        k, p = pair(kernel), pair(padding)
        if any(2 * p[i] > k[i] for i in (0, 1)):
            raise ShapeError(f"{op}: padding {p} must be at most half of the kernel {k}")
        window = cls(size, k, pair(stride) if stride else k, p, pair(dilation), ceil)
        if min(window.out) < 1:
            raise ShapeError(f"{op}: a kernel of {k} does not fit into {size} pixels padded by {p}")
        return window

    @property
    def out(self) -> tuple[int, int]:
        """The size of the result."""
        return self._out(0), self._out(1)

    def _out(self, i: int) -> int:
        n, p, s = self.size[i], self.padding[i], self.stride[i]
        room = n + 2 * p - self.dilation[i] * (self.kernel[i] - 1) - 1
        count = (-(-room // s) if self.ceil else room // s) + 1
        return count - 1 if self.ceil and (count - 1) * s >= n + p else count  # none may start in the padding behind

    def padded(self, xp: Any, x: Array, value: float) -> Array:
        """x (B, H, W, C) with `value` around it, as far as windows reach."""
        widths = [(0, 0), *((self.padding[i], self.behind(i)) for i in (0, 1)), (0, 0)]
        return xp.pad(x, widths, constant_values=value)

    def behind(self, i: int) -> int:
        """Padding after the last pixel along axis i: what is asked for, or more if the last window reaches further."""
        last = (self.out[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
        return max(self.padding[i], last - self.size[i] - self.padding[i])

    def taps(self) -> Iterator[tuple[int, int, slice, slice]]:
        """Each kernel element with the padded rows and columns it meets."""
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield i, j, self._slice(0, i), self._slice(1, j)

    def _slice(self, axis: int, tap: int) -> slice:
        start, s = tap * self.dilation[axis], self.stride[axis]
        return slice(start, start + (self.out[axis] - 1) * s + 1, s)

    def pixel(self, xp: Any, i: int, j: int) -> tuple[Array, Array]:
        """Which pixel, counted along rows, kernel element (i, j) meets at each place, and if it is one: (oh, ow, 1)."""
        rows, columns = (
            xp.arange(self.out[a]) * self.stride[a] - self.padding[a] + tap * self.dilation[a]
            for a, tap in ((0, i), (1, j))
        )
        down, across = (rows >= 0) & (rows < self.size[0]), (columns >= 0) & (columns < self.size[1])
        return (rows[:, None] * self.size[1] + columns)[..., None], (down[:, None] & across)[..., None]

    def inner(self, padded: Array) -> Array:
        """The image without its padding."""
        (h, w), (p, q) = self.size, self.padding
        return padded[:, p : p + h, q : q + w]


@primitive(torch="nn.functional.max_pool2d_with_indices", multiple=True, aux=("index",))
def max_pool2d_with_indices(
    xp: Any, input: Array, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, layout: str = "NCHW",
) -> tuple[tuple[Array, Array], Array]:  # fmt: skip
    """The largest value in each window, and its place in the image counted along rows"""
    window = _Window.over("max_pool2d", input.shape, kernel_size, stride, padding, dilation, ceil_mode, layout)
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
def _(
    xp: Any, g: tuple[Array, Array], input_shape: Shape, index: Array, kernel_size: Pair, stride: Pair | None,
    padding: Pair, dilation: Pair, ceil_mode: bool, layout: str,
) -> Array:  # fmt: skip
    window = _Window.over("max_pool2d", input_shape, kernel_size, stride, padding, dilation, ceil_mode, layout)
    grad, at = to_nhwc(g[0], layout), to_nhwc(index, layout)
    (h, w), (p, q) = window.size, window.padding
    dx = xp.zeros((grad.shape[0], h + p + window.behind(0), w + q + window.behind(1), grad.shape[3]), grad.dtype)
    for i, j, rows, columns in window.taps():
        pixel, inside = window.pixel(xp, i, j)
        dx[:, rows, columns] += xp.where(inside & (at == pixel), grad, 0.0)
    return from_nhwc(xp, window.inner(dx), layout)


@max_pool2d_with_indices.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4, 6), 2)
    yield sample((1, 2, 5, 5), 3, 2, 1)
    yield sample((1, 2, 5, 6), (2, 3), (2, 1), (1, 0), (2, 1), True)
    yield sample((2, 5, 4, 3), 2, 2, ceil_mode=True, layout="NHWC")


@max_pool2d_with_indices.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((1, 2, 4, 4), 2, 2, 2), ShapeError, "at most half of the kernel")
    yield ErrorSample(sample((1, 2, 4, 4), 5), ShapeError, "does not fit into")
    yield ErrorSample(sample((2, 4, 4), 2), ShapeError, "expected a 4-D input")


@composite(torch="nn.functional.max_pool2d")
def max_pool2d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False, layout: str = "NCHW",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The largest value in each window; with return_indices also its place in the image counted along rows"""
    both = max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode, layout)
    return both if return_indices else both[0]


@max_pool2d.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 4, 4), 2), ShapeError, "max_pool2d: expected a 4-D input")


@max_pool2d.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4, 6), 2)
    yield sample((1, 5, 5, 2), 3, 2, 1, return_indices=True, layout="NHWC")


@primitive(torch="nn.functional.avg_pool2d")
def avg_pool2d(
    xp: Any, input: Array, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, layout: str = "NCHW",
) -> Array:  # fmt: skip
    """The mean of each window; the zeros of the padding count unless count_include_pad is False"""
    window = _Window.over("avg_pool2d", input.shape, kernel_size, stride, padding, 1, ceil_mode, layout)
    padded = window.padded(xp, to_nhwc(input, layout), 0.0)
    total = 0.0
    for _, _, rows, columns in window.taps():
        total = total + padded[:, rows, columns]
    return from_nhwc(xp, total / _divisor(xp, window, count_include_pad, divisor_override, input.dtype), layout)


def _divisor(xp: Any, window: _Window, with_padding: bool, override: int | None, dtype: Any) -> Array:
    """What each window's sum is divided by, (oh, ow, 1)."""
    if override is not None:
        return xp.full((1, 1, 1), override, dtype)
    counts = []
    for i in (0, 1):
        start = xp.arange(window.out[i]) * window.stride[i] - window.padding[i]
        reach = window.padding[i] if with_padding else 0
        stop = xp.minimum(start + window.kernel[i], window.size[i] + reach)
        counts.append(stop - xp.maximum(start, -reach))
    return (counts[0][:, None] * counts[1])[..., None].astype(dtype)


@avg_pool2d.vjp("input")
def _(
    xp: Any, g: Array, input_shape: Shape, kernel_size: Pair, stride: Pair | None, padding: Pair, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None, layout: str,
) -> Array:  # fmt: skip
    window = _Window.over("avg_pool2d", input_shape, kernel_size, stride, padding, 1, ceil_mode, layout)
    share = to_nhwc(g, layout) / _divisor(xp, window, count_include_pad, divisor_override, g.dtype)
    (h, w), (p, q) = window.size, window.padding
    dx = xp.zeros((share.shape[0], h + p + window.behind(0), w + q + window.behind(1), share.shape[3]), g.dtype)
    for _, _, rows, columns in window.taps():
        dx[:, rows, columns] += share
    return from_nhwc(xp, window.inner(dx), layout)


@avg_pool2d.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4, 6), 2)
    yield sample((1, 2, 5, 5), 3, 2, 1)
    yield sample((1, 2, 5, 6), (2, 3), (2, 2), (1, 0), True, False)
    yield sample((1, 2, 4, 5), 2, 2, 1, True)
    yield sample((1, 2, 4, 4), 2, divisor_override=3)
    yield sample((2, 5, 4, 3), 2, 2, ceil_mode=True, layout="NHWC")


@avg_pool2d.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((1, 2, 4, 4), 2, 2, 2), ShapeError, "avg_pool2d: padding .* at most half of the kernel")


@primitive(torch="nn.functional.adaptive_avg_pool2d")
def adaptive_avg_pool2d(
    xp: Any, input: Array, output_size: int | tuple[int | None, int | None], layout: str = "NCHW"
) -> Array:
    """The means of output_size windows that cover the image evenly; None keeps a size"""
    x = to_nhwc(_four(input), layout)
    for axis, bins in zip((1, 2), _bins(x.shape[1:3], output_size), strict=True):
        parts = [xp.mean(x[(slice(None),) * axis + (slice(a, b),)], axis=axis) for a, b in bins]
        x = xp.stack(parts, axis=axis)
    return from_nhwc(xp, x, layout)


def _four(x: Array) -> Array:
    if x.ndim != 4:
        raise ShapeError(f"adaptive_avg_pool2d: expected a 4-D input, got {tuple(x.shape)}")
    return x


def _bins(
    size: tuple[int, ...], output_size: int | tuple[int | None, int | None]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pixels [start, stop) of each output row, and of each column."""
    wanted = (output_size, output_size) if isinstance(output_size, int) else output_size
    counts = [n if k is None else k for n, k in zip(size, wanted, strict=True)]
    h, w = ([(i * n // k, -(-(i + 1) * n // k)) for i in range(k)] for n, k in zip(size, counts, strict=True))
    return h, w


@adaptive_avg_pool2d.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, output_size: int | tuple[int | None, int | None], layout: str) -> Array:
    g = to_nhwc(g, layout)
    size = input_shape[2:] if layout == "NCHW" else input_shape[1:3]
    for axis, bins in zip((1, 2), _bins(size, output_size), strict=True):
        before = (slice(None),) * axis
        dx = xp.zeros((*g.shape[:axis], size[axis - 1], *g.shape[axis + 1 :]), g.dtype)
        for i, (a, b) in enumerate(bins):
            dx[(*before, slice(a, b))] += g[(*before, slice(i, i + 1))] / (b - a)
        g = dx
    return from_nhwc(xp, g, layout)


@adaptive_avg_pool2d.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4, 6), 1)
    yield sample((1, 2, 5, 7), (3, 4))
    yield sample((1, 2, 3, 4), (5, None))
    yield sample((2, 5, 4, 3), (2, 3), layout="NHWC")


@adaptive_avg_pool2d.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 4, 4), 2), ShapeError, "expected a 4-D input")
