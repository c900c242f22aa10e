"""The launch of resize.cuh: how an image and its axes are described to the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, int32
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape
from .resize_axes import Axis, Resizing

_FILE, _THREADS = "ops/conv/resize.cuh", 256
_TOGETHER = 8  # readers of a pixel that are asked for at once
_MOST_READERS = 1024  # pixels that a thread adds up where an image becomes large
_MODES = {"nearest": 0, "nearest-exact": 1}  # as in resize.cuh, where others are 2, or 3 with aligned corners


def no_kernel(input: Array, by: Resizing) -> str:
    """Why the kernels cannot take an input; "" if they can. Arguments that do not fit are refused in any case."""
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
        """Runs a kernel that makes `made` from `given`; where neighbours lie along an axis it has `most` to a thread.

        Args:
            k: launches kernels.
            kernel: its name.
            given: what it reads, dense.
            made: what it writes, dense.
            tables: those that it takes.
            most: elements of a packet along an axis.
        """
        length = made.shape[-1]  # along which a thread's elements lie
        width = math.gcd(length, most if self._inner == 1 else 16 // made.itemsize)
        width = 1 if (given.data.ptr | made.data.ptr) % 16 else width
        packets = made.size // width
        numbers = (packets, *self.before[::-1], *self.after[::-1], self._inner)
        args = (given, made, *tables, *map(np.int32, numbers))
        k.launch_header(_FILE, kernel, self._names(made, width), (-(-packets // _THREADS),), _THREADS, args)

    def forward(self, k: Launcher, x: Array) -> Array:
        """The resized images."""
        low, part, _ = self._tables(k, x)
        made = k.empty(self._out_shape(), x.dtype)
        self._launch(k, "resize", k.contiguous(x), made, (low, part), 4)
        return made

    def gradient(self, k: Launcher, g: Array) -> Array:
        """The gradient of the images."""
        dx = k.empty(self.shape, g.dtype)
        self._launch(k, "resize_gradient", k.contiguous(g), dx, self._tables(k, g), 2)
        return dx
