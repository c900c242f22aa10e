"""Images in another size, in NCHW or NHWC: coordinates, kernels and the op `interpolate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..arguments import Arguments
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, float32, int32
from ..namespace import Namespace
from ..op import ErrorSample, primitive, sample
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import Shape

Sizes = int | Sequence[int]

Factors = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
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
        scale, place = np.float32(self.factor), place.astype(np.float32)
        if self.mode == "nearest-exact":
            place = place + np.float32(0.5)
        return xp.floor(place * scale)

    @property
    def factor(self) -> float:
        """What a pixel's place is multiplied by."""
        if self.mode == "nearest" and self.image and self.after in (self.before, 2 * self.before):
            return self.before / self.after
        return self.scale

    def matrix(self, xp: Namespace, dtype: Any) -> Array:
        """Returns the resizing as a matrix (after, before)."""
        low, high, part = self.sources(xp)
        pixel = xp.arange(self.before)
        if part is None:
            return (pixel == low[:, None]).astype(dtype)
        weight = part[:, None]
        return ((pixel == low[:, None]) * (1.0 - weight) + (pixel == high[:, None]) * weight).astype(dtype)


_LINEAR = {"linear": 3, "bilinear": 4, "trilinear": 5}


@dataclass(frozen=True, slots=True)
class Resizing(Arguments):
    """The arguments of interpolate but for its input."""

    size: Sizes | None
    scale_factor: Factors | None
    mode: str
    align_corners: bool | None
    recompute_scale_factor: bool | None
    layout: str

    def axes(self, shape: Shape) -> list[Axis]:
        """Returns how each spatial axis of an input of `shape` is resized.

        Raises ValueError or ShapeError for arguments that do not fit together.
        """
        size, factor, mode, align = self.size, self.scale_factor, self.mode, self.align_corners
        if mode not in ("nearest", "nearest-exact", *_LINEAR) or _LINEAR.get(mode, len(shape)) != len(shape):
            raise ValueError(f"interpolate: mode {mode!r} is not known for an input of {len(shape)} dims")
        if (size is None) == (factor is None):
            raise ValueError("interpolate: expected one of size and scale_factor, got both or neither")
        if align is not None and mode not in _LINEAR:
            raise ValueError(f"interpolate: align_corners is for {', '.join(_LINEAR)}, got mode {mode!r}")
        axes = range(2, len(shape)) if self.layout == "NCHW" else range(1, len(shape) - 1)
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
                scale = before / after if size is not None or self.recompute_scale_factor else 1.0 / wanted
            plan.append(Axis(axis, before, after, scale, mode, bool(align), len(shape) == 4))
        return plan


_FILE, _THREADS = "library/resize.cuh", 256

_TOGETHER = 8  # readers of a pixel that are asked for at once

_MOST_READERS = 1024  # pixels that a thread adds up where an image becomes large

_MODES = {"nearest": 0, "nearest-exact": 1}  # as in resize.cuh, where others are 2, or 3 with aligned corners


def no_kernel(input: Array, by: Resizing) -> str:
    """Says why the kernels cannot take an input; "" if they can. Arguments that do not fit are refused in any case."""
    if reason := same(AT_MOST_FP32, input):
        return reason
    if not 3 <= input.ndim <= 5 or not input.size:
        return "no image, or nothing in it"
    axes = by.axes(input.shape)
    factor = math.prod(max(1.0, a.after / a.before) for a in axes)
    if factor * 2 ** len(axes) > _MOST_READERS:
        return "too many pixels that read one"
    return "" if factor * input.size < 2**31 else "too much"


@dataclass(slots=True)
class ResizeKernels:
    """Images of `shape`, resized along up to three axes, as the kernels take them.

    `before` and `after` are their sizes along three axes, the last first; what is not there has one pixel.
    """

    shape: Shape
    by: Resizing
    axes: list[Axis] = field(init=False)
    before: list[int] = field(init=False)
    after: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.axes = self.by.axes(self.shape)[::-1]
        missing = [1] * (3 - len(self.axes))
        self.before = [*(a.before for a in self.axes), *missing]
        self.after = [*(a.after for a in self.axes), *missing]

    @property
    def _inner(self) -> int:
        return 1 if self.by.layout == "NCHW" else self.shape[-1]

    @property
    def _mode(self) -> int:
        return _MODES.get(self.by.mode, 2 + bool(self.by.align_corners))

    def _out_shape(self) -> Shape:
        sizes = list(self.shape)
        for a in self.axes:
            sizes[a.axis] = a.after
        return tuple(sizes)

    def _names(self, x: Array, width: int) -> dict[str, Any]:
        along, each = int(self._inner == 1), 1 if self._mode < 2 else 2
        across, down = (min(_TOGETHER, -(-n * each // m)) for n, m in zip(self.after[:2], self.before[:2], strict=True))
        names = {"T": x.dtype, "WIDTH": width, "ALONG": along, "DIMS": len(self.axes), "MODE": self._mode}
        return names | {"ACROSS": across, "DOWN": down if across * down <= _TOGETHER else 0}

    def _tables(self, k: Launcher, like: Array) -> tuple[Array, Array, Array]:
        """For each pixel of the result the first that it reads and its way to the next; the readers of each pixel."""
        low, part = k.empty((sum(self.after),), int32), k.empty((sum(self.after),), float32)
        readers = k.empty((2 * sum(self.before),), int32)
        numbers: list[Any] = []
        for i in range(3):
            scale = self.axes[i].factor if i < len(self.axes) else 1.0
            numbers += [np.int32(self.before[i]), np.int32(self.after[i]), np.float64(scale)]
        grid = (-(-max(*self.before, *self.after) // _THREADS), 3)
        names = self._names(like, 1)
        k.launch_header(_FILE, "resize_tables", names, grid, _THREADS, (low, part, readers, *numbers))
        return low, part, readers

    def _launch(
        self, k: Launcher, kernel: str, given: Array, made: Array, tables: tuple[Array, ...], most: int
    ) -> None:
        """Runs a kernel that makes `made` from `given`; with `most` to a thread where neighbours lie along an axis."""
        length = made.shape[-1]  # along which a thread's elements lie
        width = math.gcd(length, most if self._inner == 1 else 16 // made.itemsize)
        width = 1 if (given.data.ptr | made.data.ptr) % 16 else width
        packets = made.size // width
        numbers = (packets, *self.before[::-1], *self.after[::-1], self._inner)
        args = (given, made, *tables, *map(np.int32, numbers))
        k.launch_header(_FILE, kernel, self._names(made, width), (-(-packets // _THREADS),), _THREADS, args)

    def forward(self, k: Launcher, x: Array) -> Array:
        """Returns the resized images."""
        low, part, _ = self._tables(k, x)
        made = k.empty(self._out_shape(), x.dtype)
        self._launch(k, "resize", k.contiguous(x), made, (low, part), 4)
        return made

    def gradient(self, k: Launcher, g: Array) -> Array:
        """Returns the gradient of the images."""
        dx = k.empty(self.shape, g.dtype)
        self._launch(k, "resize_gradient", k.contiguous(g), dx, self._tables(k, g), 2)
        return dx


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


@interpolate.cuda("library/resize.cuh", when=no_kernel)
def _(k: Launcher, input: Array, by: Resizing) -> Array:
    return ResizeKernels(input.shape, by).forward(k, input)


@interpolate.cuda_vjp("library/resize.cuh", "input", when=no_kernel)
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
