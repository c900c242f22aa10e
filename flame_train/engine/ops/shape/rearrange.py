"""Elements put elsewhere: reversed, rolled, repeated, padded, cut to a triangle, moved between pixels and channels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ....errors import ShapeError
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import booleans, integers
from ...sums import accurate_sum
from ..common.dims import Shape, at_least, axes, axis
from ..indexing.embedding import added_at


@primitive(torch="flip", data_movement=True)
def flip(xp: Namespace, input: Array, dims: Sequence[int]) -> Array:
    """input in reverse order along dims"""
    return _flipped(xp, input, dims).copy()


def _flipped(xp: Namespace, x: Array, dims: Sequence[int]) -> Array:
    return xp.flip(x, axes(dims, x.ndim, "flip")) if dims else x


flip.vjp("input")(lambda xp, g, dims: _flipped(xp, g, dims))
flip.errors(
    ErrorSample(sample((2, 3), (2,)), ShapeError, "flip: dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample((2, 3), (0, -2)), ShapeError, "flip: a dim appears twice"),
)
flip.samples(sample((2, 3), (0,)), sample((2, 3, 2), (0, 2)), sample((), (-1,)), sample((2, 3), ()))


@primitive(torch="roll", data_movement=True)
def roll(xp: Namespace, input: Array, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Array:
    """input moved along dims by shifts, what falls off one end coming in at the other; without dims, flattened"""
    counts = [len(n) if isinstance(n, Sequence) else 1 for n in (shifts, dims)]
    if counts[0] != counts[1]:
        raise ShapeError(f"roll: expected as many dims as shifts, got {shifts} along {dims}")
    return xp.roll(input, shifts, dims)


@roll.vjp("input")
def _(xp: Namespace, g: Array, shifts: int | Sequence[int], dims: int | Sequence[int] | None) -> Array:
    return xp.roll(g, -shifts if isinstance(shifts, int) else tuple(-n for n in shifts), dims)


roll.errors(
    ErrorSample(sample((2, 3), 1, 2), ShapeError, "roll: dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample((2, 3), (1, 2)), ShapeError, r"as many dims as shifts, got \(1, 2\) along None"),
)
roll.samples(sample((2, 3), 2), sample((2, 5), -1, 1), sample((3, 4), (1, -2), (0, 1)))


@primitive(torch="Tensor.repeat", data_movement=True)
def repeat(xp: Namespace, input: Array, repeats: Sequence[int]) -> Array:
    """input set side by side so many times along each dim; more repeats than dims add dims in front"""
    if len(repeats) < input.ndim:
        raise ShapeError(f"repeat: expected a number for each of {input.ndim} dims, got {tuple(repeats)}")
    return xp.tile(input, tuple(repeats))


@repeat.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, repeats: Sequence[int]) -> Array:
    shape = (1,) * (len(repeats) - len(input_shape)) + input_shape
    apart = g.reshape([n for pair in zip(repeats, shape, strict=True) for n in pair])
    total = xp.sum(apart, axis=tuple(range(0, 2 * len(repeats), 2)), dtype=compute_dtype(g.dtype))
    return total.reshape(input_shape)


repeat.samples(sample((2, 3), (2, 1)), sample((2, 3), (2, 1, 3)), sample((2,), (0,)))
repeat.errors(ErrorSample(sample((2, 3), (2,)), ShapeError, "a number for each of 2 dims"))


@primitive(torch="nn.functional.pad", data_movement=True)
def pad(xp: Namespace, input: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """input with something around it; pad = (last dim before, after, next to last before, after, ...)

    The something is `value` (0 if not given) in mode "constant". It is input itself mirrored, its border repeated or
    its other end in modes "reflect", "replicate" and "circular". Negative numbers cut off.

    Args:
        xp: the array namespace.
        input: the input.
        pad: (left, right) of the last dim, then of the one before, and so on; negative numbers cut.
        mode: "constant", "reflect", "replicate" or "circular".
        value: what a constant padding holds.

    Returns:
        The padded tensor.

    Raises:
        ShapeError: numbers that do not fit.
        ValueError: an unknown mode.
    """
    widths = _widths(pad, input.ndim)
    if mode == "constant":
        if any(a + n + b < 0 for (a, b), n in zip(widths, input.shape, strict=True)):
            raise ShapeError(f"pad: {tuple(pad)} cuts more off {tuple(input.shape)} than there is")
        kept = input[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, input.shape, strict=True))]
        return xp.pad(kept, [(max(a, 0), max(b, 0)) for a, b in widths], constant_values=value or 0.0)
    for dim, index in _sources(xp, input.shape, widths, mode):
        input = xp.take(input, index, axis=dim)
    return input


def _widths(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    if len(pad) % 2 or len(pad) > 2 * ndim:
        raise ShapeError(f"pad: expected two numbers for each of the last dims of {ndim}, got {tuple(pad)}")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


def _sources(xp: Namespace, shape: Shape, widths: list[tuple[int, int]], mode: str) -> Iterator[tuple[int, Array]]:
    """For each padded dim the index in the input that every entry of the result comes from."""
    if mode not in ("reflect", "replicate", "circular"):
        raise ValueError(f"pad: expected mode constant, reflect, replicate or circular, got {mode!r}")
    for dim, (n, (a, b)) in enumerate(zip(shape, widths, strict=True)):
        if a or b:
            limit = {"reflect": n - 1, "circular": n, "replicate": max(a, b)}[mode]
            if max(a, b) > limit or a + n + b < 1:
                raise ShapeError(f"pad: {mode} padding of dim {dim} (size {n}) must be at most {limit}, got {(a, b)}")
            at = xp.arange(-a, n + b)
            if mode == "reflect":
                at = (n - 1) - xp.abs((n - 1) - xp.abs(at))
            if mode == "circular":  # what negative padding cuts off at one end does not wrap around to the other
                first, left = max(-a, 0), n - max(-a, 0) - max(-b, 0)
                at = (at - first) % left + first
            yield dim, xp.clip(at, 0, n - 1)


@pad.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, pad: Sequence[int], mode: str) -> Array:
    widths = _widths(pad, g.ndim)
    if mode != "constant":
        for dim, index in _sources(xp, input_shape, widths, mode):
            moved = xp.moveaxis(g, dim, 0)
            g = xp.moveaxis(added_at(xp, (input_shape[dim], *moved.shape[1:]), index, moved), 0, dim)
        return g
    inner = g[tuple(slice(max(a, 0), n - max(b, 0)) for (a, b), n in zip(widths, g.shape, strict=True))]
    return xp.pad(inner, [(max(-a, 0), max(-b, 0)) for a, b in widths])


pad.samples(
    sample((2, 3), (1, 2)),
    sample((2, 3, 4), (0, 1, 2, 0)),
    sample((2, 3), (-1, 2), value=1.5),
    sample((1, 2, 3, 4), (2, 1, 1, 2), "reflect"),
    sample((1, 2, 3, 4), (2, 1, 0, 3), "replicate"),
    sample((1, 3, 4), (2, 4), "circular"),
    sample((1, 3, 4), (2, -1), "reflect"),
    sample((1, 3, 4), (-1, 2), "circular"),
)
pad.errors(
    ErrorSample(sample((2, 3), (1,)), ShapeError, "two numbers for each"),
    ErrorSample(sample((2, 3), (-2, -2)), ShapeError, r"\(-2, -2\) cuts more off \(2, 3\) than there is"),
    ErrorSample(sample((1, 2, 3), (3, 0), "reflect"), ShapeError, "must be at most 2, got"),
    ErrorSample(sample((1, 2, 3), (1, 0), "mirror"), ValueError, "got 'mirror'"),
)


@primitive(torch="triu", accepts_integers=True)
def triu(xp: Namespace, input: Array, diagonal: int = 0) -> Array:
    """The entries on and above the diagonal of the last two dims, zeros below"""
    return xp.where(_above(xp, input.shape, diagonal), input, xp.zeros((), input.dtype))


@primitive(torch="tril", accepts_integers=True)
def tril(xp: Namespace, input: Array, diagonal: int = 0) -> Array:
    """The entries on and below the diagonal of the last two dims, zeros above"""
    return xp.where(_above(xp, input.shape, diagonal + 1), xp.zeros((), input.dtype), input)


def _above(xp: Namespace, shape: Shape, diagonal: int) -> Array:
    """True where column - row >= diagonal, (rows, columns)."""
    at_least(2, shape, "triu, tril")
    return xp.arange(shape[-1])[None, :] - xp.arange(shape[-2])[:, None] >= diagonal


triu.vjp("input")(lambda xp, g, diagonal: xp.where(_above(xp, g.shape, diagonal), g, 0))
tril.vjp("input")(lambda xp, g, diagonal: xp.where(_above(xp, g.shape, diagonal + 1), 0, g))


for _op in (triu, tril):
    _op.samples(
        sample((3, 4)), sample((2, 4, 3), 1), sample((4, 4), -2), sample(booleans(3, 4), 1), sample(integers(9, 4, 3))
    )
    _op.errors(ErrorSample(sample((3,)), ShapeError, "at least 2 dims"))


@primitive(torch="nn.functional.pixel_shuffle", data_movement=True)
def pixel_shuffle(xp: Namespace, input: Array, upscale_factor: int, layout: str = "NCHW") -> Array:
    """Channels in groups of r * r spread over r x r pixels each, r = upscale_factor (arXiv 1609.05158)"""
    r = _factor("pixel_shuffle", input, upscale_factor)
    *lead, c, h, w = input.shape if layout == "NCHW" else _channels_third(input.shape)
    if c % (r * r):
        raise ShapeError(f"pixel_shuffle: {c} channels do not divide by {r} * {r}")
    n = len(lead)
    if layout == "NHWC":
        y = input.reshape(*lead, h, w, c // (r * r), r, r).transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
        return _moved(xp, input, y, *lead, h * r, w * r, c // (r * r))
    y = input.reshape(*lead, c // (r * r), r, r, h, w).transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return _moved(xp, input, y, *lead, c // (r * r), h * r, w * r)


def _moved(xp: Namespace, input: Array, y: Array, *shape: int) -> Array:
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
    r = _factor("pixel_unshuffle", input, downscale_factor)
    *lead, c, h, w = input.shape if layout == "NCHW" else _channels_third(input.shape)
    if h % r or w % r:
        raise ShapeError(f"pixel_unshuffle: {h} x {w} pixels do not divide into blocks of {r} x {r}")
    n = len(lead)
    if layout == "NHWC":
        y = input.reshape(*lead, h // r, r, w // r, r, c).transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
        return _moved(xp, input, y, *lead, h // r, w // r, c * r * r)
    y = input.reshape(*lead, c, h // r, r, w // r, r).transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return _moved(xp, input, y, *lead, c * r * r, h // r, w // r)


pixel_shuffle.vjp("input")(lambda xp, g, upscale_factor, layout: pixel_unshuffle.fn(xp, g, upscale_factor, layout))


@pixel_unshuffle.vjp("input")
def _(xp: Namespace, g: Array, downscale_factor: int, layout: str) -> Array:
    return pixel_shuffle.fn(xp, g, downscale_factor, layout)


pixel_shuffle.samples(sample((2, 8, 2, 3), 2), sample((9, 2, 1), 3), sample((2, 2, 3, 8), 2, layout="NHWC"))
pixel_unshuffle.samples(sample((2, 2, 4, 6), 2), sample((1, 3, 6), 3), sample((2, 4, 6, 2), 2, layout="NHWC"))
pixel_shuffle.errors(
    ErrorSample(sample((1, 6, 2, 2), 2), ShapeError, "6 channels do not divide by 2"),
    ErrorSample(sample((2, 2), 2), ShapeError, "at least 3 dims"),
)
pixel_unshuffle.errors(
    ErrorSample(sample((1, 1, 3, 4), 2), ShapeError, "3 x 4 pixels do not divide"),
    ErrorSample(sample((1, 3, 4), -1), ShapeError, "a factor of at least 1, got .1, 3, 4. and -1"),
)


@primitive(torch="repeat_interleave", data_movement=True)
def repeat_interleave(xp: Namespace, input: Array, repeats: int, dim: int | None = None) -> Array:
    """Each element so many times in a row along dim; without dim, flattened"""
    if not isinstance(repeats, int) or repeats < 0:
        raise ShapeError(f"repeat_interleave: expected one number of repeats of at least 0, got {repeats!r}")
    if dim is None or not input.ndim:
        return xp.repeat(input.reshape(-1), repeats)
    return xp.repeat(input, repeats, axis=axis(dim, input.ndim, "repeat_interleave"))


@repeat_interleave.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Sequence[int], repeats: int, dim: int | None) -> Array:
    shape = [math.prod(input_shape)] if dim is None or not input_shape else list(input_shape)
    at = 0 if dim is None or not input_shape else axis(dim, len(shape), "repeat_interleave")
    return accurate_sum(xp.sum, g.reshape([*shape[: at + 1], repeats, *shape[at + 1 :]]), (at + 1,), False).reshape(
        input_shape
    )


repeat_interleave.samples(
    sample((2, 3), 2), sample((2, 3), 3, 0), sample((2, 3, 2), 2, -1), sample((2, 3), 0, 1), sample((), 3)
)
repeat_interleave.errors(
    ErrorSample(sample((2, 3), 2, 2), ShapeError, "dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample((2, 3), -1), ShapeError, "expected one number of repeats of at least 0, got -1"),
)
