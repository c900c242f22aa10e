"""Patches of an image as columns (im2col), and columns added up into an image (col2im): each other's gradient."""

from __future__ import annotations

import math

import numpy as np

from ...errors import ShapeError
from ..backend.cuda.launcher import Launcher
from ..backend.cuda.libraries.cudnn_plan import Size
from ..dtype import Array
from ..namespace import Namespace
from ..op import ErrorSample, primitive, sample
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import Shape
from ..ops.conv.geometry import Pair, out_size, pair, taps

Window = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]
"""Kernel size, dilation, padding and stride, (h, w) each."""

_THREADS = 256  # as in unfold.cuh


@primitive(torch="nn.functional.unfold")
def unfold(
    xp: Namespace, input: Array, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1
) -> Array:
    """The patches under a sliding kernel: (B, C, H, W) to (B, C * kh * kw, positions)

    Args:
        input: (B, C, H, W).
        kernel_size: the window's height and width, or one number for both.
        dilation: pixels between the kernel's elements.
        padding: pixels around the image.
        stride: pixels from one position of the kernel to the next.

    Returns:
        (B, C * kh * kw, positions).
    """
    return _columns(xp, input, _window(kernel_size, dilation, padding, stride))


@primitive(torch="nn.functional.fold")
def fold(
    xp: Namespace,
    input: Array,
    output_size: Pair,
    kernel_size: Pair,
    dilation: Pair = 1,
    padding: Pair = 0,
    stride: Pair = 1,
) -> Array:
    """Patches added up where they overlap: (B, C * kh * kw, positions) to (B, C, *output_size)

    Args:
        input: (B, C * kh * kw, positions).
        output_size: the image's height and width.
        kernel_size: the window's height and width, or one number for both.
        dilation: pixels between the kernel's elements.
        padding: pixels around the image.
        stride: pixels from one position of the kernel to the next.

    Returns:
        (B, C, *output_size).
    """
    return _image(xp, input, pair(output_size), _window(kernel_size, dilation, padding, stride))


def _window(kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Window:
    window = k, d, p, s = pair(kernel_size), pair(dilation), pair(padding), pair(stride)
    if min(*k, *d, *s) < 1 or min(p) < 0:
        raise ShapeError(
            "unfold, fold: expected kernel_size, dilation and stride of at least 1 and padding of at least 0, "
            f"got {k}, {d}, {s} and {p}"
        )
    return window


def _positions(size: tuple[int, int], window: Window) -> tuple[int, int]:
    """Returns the number of positions of the kernel down and across. Raises ShapeError if there are none."""
    k, d, p, s = window
    oh, ow = (out_size(size[i], k[i], s[i], p[i], d[i]) for i in (0, 1))
    if min(oh, ow) < 1:
        raise ShapeError(f"unfold, fold: a kernel of {k} does not fit into {size} pixels padded by {p}")
    return oh, ow


def _columns(xp: Namespace, x: Array, window: Window) -> Array:
    if x.ndim != 4:
        raise ShapeError(f"unfold: expected input (B, C, H, W), got {tuple(x.shape)}")
    (kh, kw), d, p, s = window
    b, c, h, w = x.shape
    oh, ow = _positions((h, w), window)
    padded = xp.pad(x, ((0, 0), (0, 0), (p[0], p[0]), (p[1], p[1])))
    out = xp.empty((b, c, kh, kw, oh, ow), x.dtype)
    for i, j, rows, columns in taps((kh, kw), (oh, ow), s, d):
        out[:, :, i, j] = padded[:, :, rows, columns]
    return out.reshape(b, c * kh * kw, oh * ow)


def _patches(columns: Array, size: tuple[int, int], window: Window) -> Array:
    """Columns as (B, C, kh, kw, oh, ow). Raises ShapeError if they are not those of images of `size`."""
    kh, kw = window[0]
    oh, ow = _positions(size, window)
    if columns.ndim != 3 or columns.shape[1] % (kh * kw) or columns.shape[2] != oh * ow:
        raise ShapeError(
            f"fold: expected (B, C * {kh * kw}, {oh * ow}) for {oh} x {ow} positions of a {kh} x {kw} kernel, "
            f"got {tuple(columns.shape)}"
        )
    return columns.reshape(columns.shape[0], columns.shape[1] // (kh * kw), kh, kw, oh, ow)


def _image(xp: Namespace, columns: Array, size: tuple[int, int], window: Window) -> Array:
    patches, (_, d, p, s) = _patches(columns, size, window), window
    (h, w), (b, c, kh, kw, oh, ow) = size, patches.shape
    out = xp.zeros((b, c, h + 2 * p[0], w + 2 * p[1]), columns.dtype)
    for i, j, rows, across in taps((kh, kw), (oh, ow), s, d):
        out[:, :, rows, across] += patches[:, :, i, j]
    return out[:, :, p[0] : p[0] + h, p[1] : p[1] + w]


@unfold.vjp("input")
def _(
    xp: Namespace, g: Array, input_shape: Shape, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
) -> Array:
    return _image(xp, g, (input_shape[2], input_shape[3]), _window(kernel_size, dilation, padding, stride))


@fold.vjp("input")
def _(xp: Namespace, g: Array, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Array:
    return _columns(xp, g, _window(kernel_size, dilation, padding, stride))


def _no_kernel(input: Array, kernel_size: Pair) -> str:
    """Says why the kernels cannot take these; "" if they can. What does not fit is refused in any case."""
    larger = input.size * math.prod(pair(kernel_size))
    return same(AT_MOST_FP32, input) or ("" if 0 < larger < 2**31 else "nothing to compute with, or too much")


def _launch(k: Launcher, kernel: str, given: Array, made: Array, size: Size, positions: Size, window: Window) -> None:
    """Runs `kernel` between images of `size` and their columns of `positions`, both dense."""
    names = ("KERNEL", "DILATION", "PADDING", "STRIDE")
    known = {f"{axis}_{n}": value[i] for n, value in zip(names, window, strict=True) for i, axis in enumerate("HW")}
    # A thread of `fold` reads each of its pixels' patches: with few pixels its neighbours' reads lie side by side.
    length, most = (positions[1], 16 // made.itemsize) if kernel == "unfold" else (size[1], 2)
    width = 1 if made.data.ptr % 16 else math.gcd(length, most)
    packets = made.size // width
    args = (given, made, *map(np.int32, (packets, *size, *positions)))
    grid = (-(-packets // _THREADS),)
    k.launch_header("library/unfold.cuh", kernel, {"T": made.dtype, "WIDTH": width, **known}, grid, _THREADS, args)


def _columns_on_gpu(k: Launcher, x: Array, window: Window) -> Array:
    if x.ndim != 4:
        raise ShapeError(f"unfold: expected input (B, C, H, W), got {tuple(x.shape)}")
    (kh, kw), (b, c, *size) = window[0], x.shape
    oh, ow = _positions((size[0], size[1]), window)
    made = k.empty((b, c * kh * kw, oh * ow), x.dtype)
    _launch(k, "unfold", k.contiguous(x), made, (size[0], size[1]), (oh, ow), window)
    return made


def _image_on_gpu(k: Launcher, columns: Array, size: Size, window: Window) -> Array:
    b, c, _, _, oh, ow = _patches(columns, size, window).shape
    made = k.empty((b, c, *size), columns.dtype)
    _launch(k, "fold", k.contiguous(columns), made, size, (oh, ow), window)
    return made


@unfold.cuda("library/unfold.cuh", when=_no_kernel)
def _(k: Launcher, input: Array, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Array:
    return _columns_on_gpu(k, input, _window(kernel_size, dilation, padding, stride))


@unfold.cuda_vjp("library/unfold.cuh", "input", when=_no_kernel)
def _(
    k: Launcher, g: Array, input_shape: Shape, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
) -> Array:
    size = input_shape[2], input_shape[3]
    return _image_on_gpu(k, g, size, _window(kernel_size, dilation, padding, stride))


@fold.cuda("library/unfold.cuh", when=_no_kernel)
def _(
    k: Launcher, input: Array, output_size: Pair, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
) -> Array:
    return _image_on_gpu(k, input, pair(output_size), _window(kernel_size, dilation, padding, stride))


@fold.cuda_vjp("library/unfold.cuh", "input", when=_no_kernel)
def _(k: Launcher, g: Array, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Array:
    return _columns_on_gpu(k, g, _window(kernel_size, dilation, padding, stride))


unfold.samples(sample((2, 3, 4, 5), 2), sample((0, 3, 4, 5), 2), sample((1, 2, 5, 4), (3, 2), (1, 2), (1, 0), (2, 1)))

fold.samples(sample((2, 12, 12), (4, 5), 2), sample((1, 12, 6), (5, 4), (3, 2), (1, 2), (1, 0), (2, 1)))

unfold.perf_samples(sample((2, 3, 33, 40), 3, 1, 1), sample((1, 2, 40, 33), (4, 2), 2, 1, (3, 1)))

fold.perf_samples(
    sample((2, 27, 33 * 40), (33, 40), 3, 1, 1),
    sample((1, 16, 12 * 33), (40, 33), (4, 2), 2, 1, (3, 1)),
    sample((1, 3 * 64, 25), (40, 40), 8, stride=8),
)

unfold.errors(
    ErrorSample(sample((2, 3, 4), 2), ShapeError, r"expected input \(B, C, H, W\)"),
    ErrorSample(sample((1, 3, 4, 4), 5), ShapeError, "does not fit into"),
    ErrorSample(sample((1, 3, 4, 4), 2, stride=0), ShapeError, r"of at least 1 and padding .* \(0, 0\) and"),
    ErrorSample(sample((1, 3, 4, 4), 2, padding=-1), ShapeError, r"padding of at least 0, .* and \(-1, -1\)"),
)

fold.errors(
    ErrorSample(sample((2, 12, 11), (4, 5), 2), ShapeError, r"expected \(B, C \* 4, 12\)"),
    ErrorSample(sample((2, 12, 11), (4, 5), 0), ShapeError, "expected kernel_size, .* of at least 1"),
)
