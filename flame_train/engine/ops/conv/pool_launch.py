"""The launch of the pooling kernels: windows over an image as constants to compile with, and sizes as arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...backend.cuda.libraries.cudnn_layouts import Size
from ...dtype import Array
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape
from .geometry import image_size
from .pool_window import Window

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
        k.launch_header("ops/conv/pool.cuh", kernel, names, (-(-packets // _THREADS),), _THREADS, args)

    def launch_whole(self, k: Launcher, g: Array, dx: Array) -> None:
        """The gradient of the means of whole images in NCHW."""
        width = math.gcd(dx.size, 16 // dx.itemsize)
        names = {"T": dx.dtype, "WIDTH": width, **self.windows}
        args, packets = (k.contiguous(g), dx, np.int32(dx.size // width)), dx.size // width
        grid = (-(-packets // _THREADS),)
        k.launch_header("ops/conv/pool.cuh", "image_mean_gradient", names, grid, _THREADS, args)


def _by_axis(parts: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {f"{axis}_{name}": pair[i] for name, pair in parts.items() for i, axis in enumerate("HW")}
