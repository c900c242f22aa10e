"""Images in another size, in NCHW or NHWC."""

from __future__ import annotations

import math

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from ..common.dims import Shape
from .resize_axes import Factors, Resizing, Sizes
from .resize_launch import ResizeKernels, no_kernel


@primitive(torch=None, data_movement=True)
def upsample_nearest(xp: Namespace, input: Array, scale_factor: int = 2, layout: str = "NCHW") -> Array:
    """Each pixel repeated scale_factor times in both directions (torch's interpolate, mode="nearest")"""
    if input.ndim != 4:
        raise ShapeError(f"upsample_nearest: expected a 4-D input, got {tuple(input.shape)}")
    h, w = (2, 3) if layout == "NCHW" else (1, 2)
    return xp.repeat(xp.repeat(input, scale_factor, axis=h), scale_factor, axis=w)


@upsample_nearest.vjp("input")
def _(xp: Namespace, g: Array, scale_factor: int, layout: str) -> Array:
    n = scale_factor
    if layout == "NCHW":
        b, c, h, w = g.shape
        return xp.sum(g.reshape(b, c, h // n, n, w // n, n), axis=(3, 5), dtype=compute_dtype(g.dtype))
    b, h, w, c = g.shape
    return xp.sum(g.reshape(b, h // n, n, w // n, n, c), axis=(2, 4), dtype=compute_dtype(g.dtype))


def _doubled(input: Array, scale_factor: int, layout: str) -> str:
    """Why our own kernel is not used; "" if it is."""
    if layout != "NHWC" or scale_factor != 2 or input.ndim != 4 or input.size == 0:
        return "only channels-last, twice the size"
    return conditions.same(conditions.AT_MOST_FP32, input)


@upsample_nearest.cuda("copies", when=_doubled)
def _(k: Launcher, input: Array) -> Array:
    b, h, w, c = input.shape
    made = k.empty((b, h, 2, w, 2, c), input.dtype)
    k.copy([made], [input[:, :, None, :, None]])
    return made.reshape(b, 2 * h, 2 * w, c)


@upsample_nearest.cuda_vjp("generated", "input", when=_doubled)
def _(k: Launcher, g: Array) -> Array:
    four = {f"g{i}{j}": g[:, i::2, j::2] for i in range(2) for j in range(2)}
    return k.elementwise((" + ".join(four),), four, (g.dtype,))[0]


upsample_nearest.errors(ErrorSample(sample((2, 3, 4)), ShapeError, "upsample_nearest: expected a 4-D input"))
upsample_nearest.samples(
    sample((2, 3, 2, 3)), sample((1, 2, 3, 4), 3, layout="NHWC"), sample((2, 3, 2, 5), layout="NHWC")
)
upsample_nearest.perf_samples(sample((2, 9, 7, 64), layout="NHWC"))


@primitive(torch="nn.functional.interpolate")
def interpolate(
    xp: Namespace,
    input: Array,
    size: Sizes | None = None,
    scale_factor: Factors | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    layout: str = "NCHW",
) -> Array:
    """input resized to `size` or by `scale_factor`, to the nearest pixel or between the two around along each axis

    mode is "nearest", "nearest-exact", "linear" (B, C, L), "bilinear" or "trilinear". With align_corners the corner
    pixels' centres stay in the corners; without, the outer edges of the images meet. Coordinates are PyTorch's.

    Args:
        xp: the array namespace.
        input: (B, C, ...), or (B, ..., C) in NHWC.
        size: the result's sizes, or one number for all dims.
        scale_factor: the same as factors of the input; one of the two is given.
        mode: the interpolation.
        align_corners: whether the corner pixels keep their places.
        recompute_scale_factor: whether the factor is that of the rounded sizes.
        layout: "NCHW" or "NHWC".

    Returns:
        (B, C, *sizes), or (B, *sizes, C).
    """
    by = Resizing(size, scale_factor, mode, align_corners, recompute_scale_factor, layout)
    for axis in by.axes(input.shape):
        low, high, part = axis.sources(xp)
        near = xp.take(input, low, axis=axis.axis)
        if part is None:
            input = near
            continue
        along = [1] * input.ndim
        along[axis.axis] = -1
        weight = part.astype(input.dtype).reshape(along)
        input = near * (1.0 - weight) + xp.take(input, high, axis=axis.axis) * weight
    return input


@interpolate.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, by: Resizing) -> Array:
    for axis in by.axes(input_shape):
        moved = xp.matmul(xp.moveaxis(g, axis.axis, -1), axis.matrix(xp, g.dtype))  # by the transposed matrix
        g = xp.moveaxis(moved, -1, axis.axis)
    return g


@interpolate.cuda("ops/conv/resize.cuh", when=no_kernel)
def _(k: Launcher, input: Array, by: Resizing) -> Array:
    return ResizeKernels(input.shape, by).forward(k, input)


@interpolate.cuda_vjp("ops/conv/resize.cuh", "input", when=no_kernel)
def _(k: Launcher, g: Array, input_shape: Shape, by: Resizing) -> Array:
    return ResizeKernels(input_shape, by).gradient(k, g)


interpolate.samples(
    sample((2, 3, 2, 3), (5, 4)),
    sample((1, 2, 3, 4), None, 2, "nearest"),
    sample((1, 2, 5), None, 2, "nearest"),
    sample((1, 2, 5, 4), (3, 7), None, "nearest-exact"),
    sample((1, 2, 3, 4), (5, 7), None, "bilinear"),
    sample((1, 2, 3, 4), None, (1.5, 0.6), "bilinear"),
    sample((1, 2, 3, 4), (5, 1), None, "bilinear", True),
    sample((1, 2, 3), None, 1.7, "linear", recompute_scale_factor=True),
    sample((1, 3, 4, 2), None, 2, "bilinear", layout="NHWC"),
)
interpolate.errors(
    ErrorSample(sample((1, 2, 3, 4), 5, None, "bicubic"), ValueError, "mode 'bicubic' is not known"),
    ErrorSample(sample((1, 2, 3, 4)), ValueError, "one of size and scale_factor"),
    ErrorSample(sample((1, 2, 3, 4), 5, None, "nearest", True), ValueError, "align_corners is for"),
    ErrorSample(sample((1, 2, 3, 4), (5,)), ShapeError, "expected 2 numbers"),
    ErrorSample(sample((1, 2, 3, 4), 0), ShapeError, "sizes and factors above 0, got 0"),
    ErrorSample(sample((1, 2, 3, 4), None, 0.3), ShapeError, "at least 1, got 3 to 0 along dim 2"),
    ErrorSample(sample((1, 2, 3, 4), None, math.nan), ShapeError, "sizes and factors above 0, got nan"),
    ErrorSample(sample((1, 2, 3, 4), 2.5), ShapeError, "whole numbers for size, got 2.5"),
)
interpolate.perf_samples(
    sample((2, 3, 33, 40), None, 2.0),
    sample((2, 3, 40, 31), (57, 64), None, "nearest-exact"),
    sample((2, 3, 33, 40), None, 2.0, "bilinear"),
    sample((2, 3, 33, 41), (20, 95), None, "bilinear", True),
    sample((1, 2, 7, 9, 10), (9, 12, 20), None, "trilinear"),
    sample((2, 3, 300), None, 2.6, "linear"),
    sample((2, 17, 19, 24), None, 1.7, "bilinear", layout="NHWC"),
    sample((2, 17, 19, 24), (40, 8), layout="NHWC"),
)
