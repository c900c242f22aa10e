"""Images in another size, in NCHW or NHWC."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from ..common.dims import Shape

Sizes = int | Sequence[int]
Factors = float | Sequence[float]


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
    for axis in _plan(input.shape, size, scale_factor, mode, align_corners, recompute_scale_factor, layout):
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


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is resized, from `before` to `after` pixels, with `scale` input pixels to an output pixel.

    `axis` is its dim, `align` is align_corners, `image` says that the input is 4-D.
    """

    axis: int
    before: int
    after: int
    scale: float
    mode: str
    align: bool
    image: bool

    def sources(self, xp: Namespace) -> tuple[Array, Array, Array | None]:
        """For each output pixel the two input pixels around it, and its position from 0 to 1; None for nearest."""
        place = xp.arange(self.after, dtype=np.float64)
        last = self.before - 1
        if not self.mode.endswith("linear"):
            at = self._nearest(xp, place).astype(np.int64)
            return xp.minimum(at, last), at, None
        x = place * self.scale if self.align else xp.maximum((place + 0.5) * self.scale - 0.5, 0.0)
        low = xp.minimum(xp.floor(x), last)
        return low.astype(np.int64), xp.minimum(low + 1, last).astype(np.int64), xp.clip(x - low, 0.0, 1.0)

    def _nearest(self, xp: Namespace, place: Array) -> Array:
        """The nearest pixel, in fp32 as PyTorch computes it: in images of equal or double size by the exact ratio."""
        scale, place = np.float32(self.scale), place.astype(np.float32)
        if self.mode == "nearest-exact":
            return xp.floor((place + np.float32(0.5)) * scale)
        if self.image and self.after in (self.before, 2 * self.before):
            return xp.floor(place * np.float32(self.before / self.after))
        return xp.floor(place * scale)

    def matrix(self, xp: Namespace, dtype: Any) -> Array:
        """The resizing as a matrix (after, before)."""
        low, high, part = self.sources(xp)
        pixel = xp.arange(self.before)
        if part is None:
            return (pixel == low[:, None]).astype(dtype)
        weight = part[:, None]
        return ((pixel == low[:, None]) * (1.0 - weight) + (pixel == high[:, None]) * weight).astype(dtype)


_LINEAR = {"linear": 3, "bilinear": 4, "trilinear": 5}


def _plan(
    shape: Shape,
    size: Sizes | None,
    factor: Factors | None,
    mode: str,
    align: bool | None,
    recompute: bool | None,
    layout: str,
) -> list[_Axis]:
    """How each spatial axis is resized. Raises ValueError or ShapeError for arguments that do not fit together.

    Args:
        shape: the input's shape.
        size, factor, mode, align, recompute, layout: as in `interpolate`.

    Returns:
        One for each spatial axis.

    Raises:
        ShapeError: sizes that do not fit.
        ValueError: arguments that exclude each other.
    """
    if mode not in ("nearest", "nearest-exact", *_LINEAR) or _LINEAR.get(mode, len(shape)) != len(shape):
        raise ValueError(f"interpolate: mode {mode!r} is not known for an input of {len(shape)} dims")
    if (size is None) == (factor is None):
        raise ValueError("interpolate: expected one of size and scale_factor, got both or neither")
    if align is not None and mode not in _LINEAR:
        raise ValueError(f"interpolate: align_corners is for {', '.join(_LINEAR)}, got mode {mode!r}")
    axes = range(2, len(shape)) if layout == "NCHW" else range(1, len(shape) - 1)
    given: Any = size if size is not None else factor
    each = list(given) if isinstance(given, Sequence) else [given] * len(axes)
    if len(each) != len(axes):
        raise ShapeError(f"interpolate: expected {len(axes)} numbers for {tuple(shape)}, got {given}")
    if size is not None and not all(isinstance(n, (int, np.integer)) for n in each):
        raise ShapeError(f"interpolate: expected whole numbers for size, got {size!r}")
    plan = []
    for axis, wanted in zip(axes, each, strict=True):
        before = shape[axis]
        if not 0 < wanted < math.inf:
            raise ShapeError(f"interpolate: expected sizes and factors above 0, got {given!r}")
        after = wanted if size is not None else math.floor(before * wanted)
        if min(before, after) < 1:
            raise ShapeError(f"interpolate: expected sizes of at least 1, got {before} to {after} along dim {axis}")
        if align:
            scale = (before - 1) / (after - 1) if after > 1 else 0.0
        else:
            scale = before / after if size is not None or recompute else 1.0 / wanted
        plan.append(_Axis(axis, before, after, scale, mode, bool(align), len(shape) == 4))
    return plan


@interpolate.vjp("input")
def _(
    xp: Namespace,
    g: Array,
    input_shape: Shape,
    size: Sizes | None,
    scale_factor: Factors | None,
    mode: str,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
    layout: str,
) -> Array:
    for axis in _plan(input_shape, size, scale_factor, mode, align_corners, recompute_scale_factor, layout):
        moved = xp.matmul(xp.moveaxis(g, axis.axis, -1), axis.matrix(xp, g.dtype))  # by the transposed matrix
        g = xp.moveaxis(moved, -1, axis.axis)
    return g


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
