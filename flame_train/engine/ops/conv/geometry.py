"""Where a kernel lies in an image: its steps and taps, and images' sizes and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ....errors import ShapeError
from ...arguments import Arguments
from ...backend.cuda.libraries.cudnn_plan import Size, Steps
from ...dtype import Array
from ...namespace import Namespace
from ..common.dims import Shape

Pair = int | tuple[int, ...]
Padding = int | tuple[int, ...] | str


def pair(value: Padding) -> Size:
    """(h, w) from one number or two; a tuple of one counts as one. Raises ShapeError for anything else."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(given) not in (1, 2) or not all(isinstance(n, (int, np.integer)) for n in given):
        raise ShapeError(f"expected a whole number, or two for height and width, got {value!r}")
    return int(given[0]), int(given[-1])


def steps(weight_shape: Shape, stride: Pair, padding: Padding, dilation: Pair, op: str = "conv2d") -> Steps:
    """Returns the steps (h, w) of a kernel of `weight_shape` (..., kh, kw). "same" keeps the size, "valid" pads none.

    Raises ShapeError for a stride or dilation below 1 or a padding below 0, and for "same" padding that would have to
    be uneven.

    Args:
        weight_shape: (out, in / groups, kh, kw).
        stride, padding, dilation: pixels, one number or (h, w); padding may be "same" or "valid".

    Raises:
        ShapeError: a stride or dilation below 1, a padding below 0, or "same" padding that would be uneven.
    """
    s, d = pair(stride), pair(dilation)
    if min(*s, *d) < 1:
        raise ShapeError(f"{op}: expected stride and dilation of at least 1, got {stride} and {dilation}")
    if not isinstance(padding, str):
        if min(pair(padding)) < 0:
            raise ShapeError(
                f"{op}: expected padding of at least 0, got {padding}; a slice leaves out what lies outside"
            )
        return Steps(s, pair(padding), d)
    if padding == "valid":
        return Steps(s, (0, 0), d)
    around = [n * (k - 1) for n, k in zip(d, weight_shape[2:], strict=True)]
    if padding != "same" or s != (1, 1) or any(n % 2 for n in around):
        raise ShapeError(
            f"{op}: padding {padding!r} with stride {s} and a kernel of {weight_shape[2:]}: expected numbers, "
            "'valid', or 'same' with stride 1 and a kernel that has a middle; pad() gives uneven padding"
        )
    return Steps(s, (around[0] // 2, around[1] // 2), d)


@dataclass(frozen=True, slots=True)
class Conv(Arguments):
    """The arguments of conv2d that are no tensors."""

    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    layout: str

    def steps(self, weight: Shape) -> Steps:
        """Returns the steps of a kernel of shape `weight`; raises ShapeError as the function of that name does."""
        return steps(weight, self.stride, self.padding, self.dilation)


def to_nhwc(x: Array, layout: str) -> Array:
    """Returns x as (B, H, W, C), a view."""
    return x.transpose(0, 2, 3, 1) if layout == "NCHW" else x


def image_size(shape: Shape, layout: str) -> Size:
    """Returns height and width of images of `shape`."""
    return (shape[2], shape[3]) if layout == "NCHW" else (shape[1], shape[2])


def nhwc_shape(shape: Shape, layout: str) -> Shape:
    """Returns `shape` as (B, H, W, C)."""
    return (shape[0], shape[2], shape[3], shape[1]) if layout == "NCHW" else shape


def from_nhwc(xp: Namespace, y: Array, layout: str) -> Array:
    """Returns y (B, H, W, C) in `layout`, dense."""
    return xp.ascontiguousarray(y.transpose(0, 3, 1, 2)) if layout == "NCHW" else y


def out_size(n: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Returns the pixels of a convolution's output along one axis.

    Args:
        n, kernel: pixels of image and kernel along the axis.
        stride, padding, dilation: as in `Steps`, along the axis.
    """
    return (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def under(first: int, stop: int, tap: int, stride: int, dilation: int) -> slice:
    """Returns the slice of the padded input that a tap of the kernel reads for outputs [first, stop).

    Args:
        first, stop: the outputs.
        tap: the index in the kernel.
        stride, dilation: in pixels.
    """
    return slice(first * stride + tap * dilation, (stop - 1) * stride + tap * dilation + 1, stride)


def taps(kernel: Size, out: Size, s: Size, d: Size) -> Iterator[tuple[int, int, slice, slice]]:
    """Each kernel element (i, j) with the padded input's rows and columns that it reads for all outputs (oh, ow)."""
    for i in range(kernel[0]):
        rows = under(0, out[0], i, s[0], d[0])
        for j in range(kernel[1]):
            yield i, j, rows, under(0, out[1], j, s[1], d[1])
