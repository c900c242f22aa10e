"""The windows of pooling along an image's axes, and the kernels that pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..arguments import Arguments
from ..backend.cuda.launcher import Launcher
from ..backend.cuda.libraries.cudnn_plan import Size
from ..dtype import Array
from ..namespace import Namespace
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import Shape
from ..ops.conv.geometry import Pair, image_size, pair, taps


@dataclass(frozen=True, slots=True)
class Pooling(Arguments):
    """The arguments of a pooling op that say where its windows lie."""

    kernel_size: Pair
    stride: Pair | None
    padding: Pair
    ceil_mode: bool
    layout: str


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window over an image of `size` pixels: what it covers and how often."""

    size: Size
    kernel: Size
    stride: Size
    padding: Size
    dilation: Size
    ceil: bool

    @classmethod
    def over(cls, op: str, shape: Shape, given: Pooling, dilation: Pair = 1) -> Window:
        """Returns the window over an input of `shape`; raises ShapeError for one that does not fit."""
        if len(shape) != 4:
            raise ShapeError(f"{op}: expected a 4-D input in {given.layout}, got {tuple(shape)}")
        size = image_size(shape, given.layout)
        k, p, d = pair(given.kernel_size), pair(given.padding), pair(dilation)
        s = k if given.stride in (None, (), []) else pair(given.stride)
        if min(*k, *s, *d) < 1:
            raise ShapeError(f"{op}: expected kernel, stride and dilation of at least 1, got {k}, {s}, {dilation}")
        if any(not 0 <= 2 * p[i] <= k[i] for i in (0, 1)):
            raise ShapeError(f"{op}: padding {p} must be at least 0 and at most half of the kernel {k}")
        window = cls(size, k, s, p, d, given.ceil_mode)
        if min(window.out) < 1:
            raise ShapeError(f"{op}: a kernel of {k} does not fit into {size} pixels padded by {p}")
        return window

    @property
    def out(self) -> Size:
        """The size of the result."""
        return self._out(0), self._out(1)

    def _out(self, i: int) -> int:
        n, p, s = self.size[i], self.padding[i], self.stride[i]
        span = n + 2 * p - self.dilation[i] * (self.kernel[i] - 1) - 1
        count = (-(-span // s) if self.ceil else span // s) + 1
        beyond = (count - 1) * s >= n + p  # the last window would start in the padding at the end
        return count - 1 if self.ceil and beyond else count

    def padded(self, xp: Namespace, x: Array, value: float) -> Array:
        """x (B, H, W, C) with `value` around it, as far as windows reach."""
        widths = [(0, 0), *((self.padding[i], self.behind(i)) for i in (0, 1)), (0, 0)]
        return xp.pad(x, widths, constant_values=value)

    def behind(self, i: int) -> int:
        """Padding after the last pixel along axis i: as given, or more if the last window reaches further."""
        last = (self.out[i] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1) + 1
        return max(self.padding[i], last - self.size[i] - self.padding[i])

    def taps(self) -> Iterator[tuple[int, int, slice, slice]]:
        """Yields each kernel element (i, j) with the padded rows and columns it meets."""
        return taps(self.kernel, self.out, self.stride, self.dilation)

    def pixel(self, xp: Namespace, i: int, j: int) -> tuple[Array, Array]:
        """The index, counted along rows, of the pixel under kernel element (i, j), and whether it lies in the image.

        Both are (oh, ow, 1).
        """
        rows, columns = (
            xp.arange(self.out[a]) * self.stride[a] - self.padding[a] + tap * self.dilation[a]
            for a, tap in ((0, i), (1, j))
        )
        down, across = (rows >= 0) & (rows < self.size[0]), (columns >= 0) & (columns < self.size[1])
        return (rows[:, None] * self.size[1] + columns)[..., None], (down[:, None] & across)[..., None]

    def scattered(self, xp: Namespace, g: Array, part: Callable[[int, int], Array]) -> Array:
        """The gradient of images (B, H, W, C): `part` of each kernel element (i, j), added to the pixels that it meets.

        `part` has the shape and dtype of `g`, (B, oh, ow, C).
        """
        (h, w), (p, q) = self.size, self.padding
        dx = xp.zeros((g.shape[0], h + p + self.behind(0), w + q + self.behind(1), g.shape[3]), g.dtype)
        for i, j, rows, columns in self.taps():
            dx[:, rows, columns] += part(i, j)
        return dx[:, p : p + h, q : q + w]


_THREADS = 256


def no_kernel(input: Array) -> str:
    """Why the kernels cannot take an input; "" if they can. Misfitting windows are refused by `Window` in any case."""
    return same(AT_MOST_FP32, input) or ("" if 0 < input.size < 2**31 else "nothing to compute with, or too much")


@dataclass(frozen=True, slots=True)
class PoolKernels:
    """Windows over images of `shape`, as the kernels take them: constants to compile with, and sizes as arguments."""

    shape: Shape
    layout: str
    out: Size
    windows: dict[str, int]

    @classmethod
    def sliding(cls, window: Window, shape: Shape, layout: str, reach: Size) -> PoolKernels:
        """Of equal windows; pixels of the padding up to `reach` count in a mean."""
        parts = {"KERNEL": window.kernel, "STRIDE": window.stride, "PADDING": window.padding}
        parts |= {"DILATION": window.dilation, "REACH": reach, "SIZE": (0, 0), "OUT": (0, 0)}
        return cls(shape, layout, window.out, _by_axis(parts) | {"INNER": 0})

    @classmethod
    def even(cls, out: Size, shape: Shape, layout: str) -> PoolKernels:
        """Of `out` windows that cover the image evenly."""
        size = image_size(shape, layout)
        parts = {"KERNEL": (0, 0), "STRIDE": (1, 1), "PADDING": (0, 0), "DILATION": (1, 1), "REACH": (0, 0)}
        inner = 1 if layout == "NCHW" else shape[3]
        return cls(shape, layout, out, _by_axis(parts | {"SIZE": size, "OUT": out}) | {"INNER": inner})

    @property
    def pooled(self) -> Shape:
        """The result's shape."""
        n, c = self.shape[0], self.shape[1 if self.layout == "NCHW" else 3]
        return (n, c, *self.out) if self.layout == "NCHW" else (n, *self.out, c)

    def launch(self, k: Launcher, kernel: str, arrays: tuple[Array, ...], made: tuple[Array, ...], *more: Any) -> None:
        """Runs `kernel`, which makes the first of `made`, of a dtype that all arrays but indices have."""
        inner = 1 if self.layout == "NCHW" else self.shape[3]
        dense = [k.contiguous(a) for a in arrays]
        width = 1 if any(a.data.ptr % 16 for a in dense) else math.gcd(inner, 16 // made[0].itemsize)
        packets = made[0].size // width
        numbers = (packets, *image_size(self.shape, self.layout), *self.out, inner)
        names = {"T": made[0].dtype, "WIDTH": width, **self.windows}
        args = (*dense, *made, *map(np.int32, numbers), *more)
        k.launch_header("library/pool.cuh", kernel, names, (-(-packets // _THREADS),), _THREADS, args)

    def launch_whole(self, k: Launcher, g: Array, dx: Array) -> None:
        """The gradient of the means of whole images in NCHW."""
        width = math.gcd(dx.size, 16 // dx.itemsize)
        names = {"T": dx.dtype, "WIDTH": width, **self.windows}
        args, packets = (k.contiguous(g), dx, np.int32(dx.size // width)), dx.size // width
        grid = (-(-packets // _THREADS),)
        k.launch_header("library/pool.cuh", "image_mean_gradient", names, grid, _THREADS, args)


def _by_axis(parts: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {f"{axis}_{name}": pair[i] for name, pair in parts.items() for i, axis in enumerate("HW")}
