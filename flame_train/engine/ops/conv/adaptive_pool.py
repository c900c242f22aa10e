"""Pooling to a given size, in NCHW or NHWC."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.codegen.kernel_ir import Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common.dims import Shape
from ..common.row_kernels import reduce
from .geometry import from_nhwc, image_size, to_nhwc
from .pool_launch import PoolKernels, no_kernel

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
    """The pixels [start, stop) of each output row, and of each column."""
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


# ---- kernels ------------------------------------------------------------------------------------------------------


def _no_bins(input: Array, output_size: Sizes) -> str:
    wanted = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    return "an empty result" if 0 in wanted else no_kernel(input)


def _kernels(shape: Shape, output_size: Sizes, layout: str) -> PoolKernels:
    rows, columns = _bins(image_size(shape, layout), output_size)
    return PoolKernels.even((len(rows), len(columns)), shape, layout)


@adaptive_avg_pool2d.cuda("flame", when=_no_bins)
def _(k: Launcher, input: Array, output_size: Sizes, layout: str) -> Array:
    kernels = _kernels(_four(input).shape, output_size, layout)
    if kernels.out == (1, 1):
        whole = (2, 3) if layout == "NCHW" else (1, 2)
        return reduce(k, Reduction("sum", "input", "total / n"), {"input": input}, whole, input.dtype)
    y = k.empty(kernels.pooled, input.dtype)
    kernels.launch(k, "avg_pool", (input,), (y,), np.float32(0))
    return y


@adaptive_avg_pool2d.cuda_vjp("flame", "input", when=_no_bins)
def _(k: Launcher, g: Array, input_shape: Shape, output_size: Sizes, layout: str) -> Array:
    dx, kernels = k.empty(input_shape, g.dtype), _kernels(input_shape, output_size, layout)
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
