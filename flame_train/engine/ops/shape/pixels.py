"""Elements moved between pixels and channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....errors import ShapeError
from ...arguments import named
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, Op, primitive, sample
from ..common.conditions import no_copies
from ..common.dims import Shape


@primitive(torch="nn.functional.pixel_shuffle", data_movement=True)
def pixel_shuffle(xp: Namespace, input: Array, upscale_factor: int, layout: str = "NCHW") -> Array:
    """Channels in groups of r * r spread over r x r pixels each, r = upscale_factor (arXiv 1609.05158)"""
    return _copied(xp, input, *_shuffled(input, upscale_factor, layout))


def _shuffled(input: Array, factor: int, layout: str) -> tuple[Array, Shape]:
    """A view of `input` with the entries in the order of pixel_shuffle's result, and the result's shape."""
    r = _factor("pixel_shuffle", input, factor)
    *lead, c, h, w = input.shape if layout == "NCHW" else _channels_third(input.shape)
    if c % (r * r):
        raise ShapeError(f"pixel_shuffle: {c} channels do not divide by {r} * {r}")
    n = len(lead)
    if layout == "NHWC":
        y = input.reshape(*lead, h, w, c // (r * r), r, r).transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
        return y, (*lead, h * r, w * r, c // (r * r))
    y = input.reshape(*lead, c // (r * r), r, r, h, w).transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return y, (*lead, c // (r * r), h * r, w * r)


def _copied(xp: Namespace, input: Array, y: Array, shape: Shape) -> Array:
    """`y` in another shape, copied where it still shares memory with `input`: PyTorch's result never does."""
    found = y.reshape(shape)
    return found.copy() if xp.may_share_memory(found, input) else found


def _factor(op: str, input: Array, r: int) -> int:
    if input.ndim < 3 or r < 1:
        raise ShapeError(f"{op}: expected at least 3 dims and a factor of at least 1, got {tuple(input.shape)} and {r}")
    return r


def _channels_third(shape: Shape) -> Shape:
    return (*shape[:-3], shape[-1], shape[-3], shape[-2])


@primitive(torch="nn.functional.pixel_unshuffle", data_movement=True)
def pixel_unshuffle(xp: Namespace, input: Array, downscale_factor: int, layout: str = "NCHW") -> Array:
    """The r x r pixels of each block as channels, r = downscale_factor: pixel_shuffle undone"""
    return _copied(xp, input, *_unshuffled(input, downscale_factor, layout))


def _unshuffled(input: Array, factor: int, layout: str) -> tuple[Array, Shape]:
    """A view of `input` with the entries in the order of pixel_unshuffle's result, and the result's shape."""
    r = _factor("pixel_unshuffle", input, factor)
    *lead, c, h, w = input.shape if layout == "NCHW" else _channels_third(input.shape)
    if h % r or w % r:
        raise ShapeError(f"pixel_unshuffle: {h} x {w} pixels do not divide into blocks of {r} x {r}")
    n = len(lead)
    if layout == "NHWC":
        y = input.reshape(*lead, h // r, r, w // r, r, c).transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
        return y, (*lead, h // r, w // r, c * r * r)
    y = input.reshape(*lead, c, h // r, r, w // r, r).transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return y, (*lead, c * r * r, h // r, w // r)


pixel_shuffle.vjp("input")(lambda xp, g, upscale_factor, layout: pixel_unshuffle.fn(xp, g, upscale_factor, layout))
pixel_unshuffle.vjp("input")(lambda xp, g, downscale_factor, layout: pixel_shuffle.fn(xp, g, downscale_factor, layout))


def _pixel_kernels(op: Op, forth: Callable[..., tuple[Array, Shape]], back: Callable[..., tuple[Array, Shape]]) -> None:
    """The op's kernels and its gradient's: copies of the views that `forth` and `back` make."""

    factor = op.names[1]

    def forward(k: Launcher, **given: Any) -> Array:
        y, shape = forth(given["input"], given[factor], given["layout"])
        return k.copied(y).reshape(shape)

    def backward(k: Launcher, g: Array, *given: Any) -> Array:
        y, shape = back(g, *given)
        return k.copied(y).reshape(shape)

    op.cuda("copies", when=no_copies)(named(forward, ["k", "input", factor, "layout"]))
    op.cuda_vjp("copies", "input", when=no_copies)(named(backward, ["k", "g", factor, "layout"]))


_pixel_kernels(pixel_shuffle, _shuffled, _unshuffled)
_pixel_kernels(pixel_unshuffle, _unshuffled, _shuffled)
pixel_shuffle.samples(sample((2, 8, 2, 3), 2), sample((9, 2, 1), 3), sample((2, 2, 3, 8), 2, layout="NHWC"))
pixel_unshuffle.samples(sample((2, 2, 4, 6), 2), sample((1, 3, 6), 3), sample((2, 4, 6, 2), 2, layout="NHWC"))
pixel_shuffle.perf_samples(sample((3, 36, 33, 20), 3), sample((2, 20, 31, 64), 2, layout="NHWC"))
pixel_unshuffle.perf_samples(sample((3, 5, 66, 40), 2), sample((2, 40, 62, 12), 2, layout="NHWC"))
pixel_shuffle.errors(
    ErrorSample(sample((1, 6, 2, 2), 2), ShapeError, "6 channels do not divide by 2"),
    ErrorSample(sample((2, 2), 2), ShapeError, "at least 3 dims"),
)
pixel_unshuffle.errors(
    ErrorSample(sample((1, 1, 3, 4), 2), ShapeError, "3 x 4 pixels do not divide"),
    ErrorSample(sample((1, 3, 4), -1), ShapeError, "a factor of at least 1, got .1, 3, 4. and -1"),
)
