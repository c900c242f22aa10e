"""Elements put elsewhere: reversed, rolled, repeated, padded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...sums import accurate_sum
from ..common.conditions import floating, no_copies
from ..common.dims import Shape, axes, axis
from ..common.row_kernels import sum_over
from ..indexing.embedding import added_at


@primitive(torch="flip", data_movement=True)
def flip(xp: Namespace, input: Array, dims: Sequence[int]) -> Array:
    """input in reverse order along dims"""
    return _flipped(xp, input, dims).copy()


def _flipped(xp: Namespace, x: Array, dims: Sequence[int]) -> Array:
    return xp.flip(x, axes(dims, x.ndim, "flip")) if dims else x


flip.vjp("input")(lambda xp, g, dims: _flipped(xp, g, dims))


@flip.cuda("copies", when=no_copies)
def _(k: Launcher, input: Array, dims: Sequence[int]) -> Array:
    return k.copied(_flipped(k.xp, input, dims))


flip.errors(
    ErrorSample(sample((2, 3), (2,)), ShapeError, "flip: dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample((2, 3), (0, -2)), ShapeError, "flip: a dim appears twice"),
)
flip.samples(sample((2, 3), (0,)), sample((2, 3, 2), (0, 2)), sample((), (-1,)), sample((2, 3), ()))


flip.perf_samples(sample((3, 70, 129), (2,)), sample((3, 70, 64), (0, 1)))


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


@repeat.cuda(
    "copies", when=lambda input, repeats: no_copies(input) if len(repeats) >= input.ndim else "too few repeats"
)
def _(k: Launcher, input: Array, repeats: Sequence[int]) -> Array:
    shape = (1,) * (len(repeats) - input.ndim) + input.shape
    beside = input.reshape([n for size in shape for n in (1, size)])
    whole = k.xp.broadcast_to(beside, [n for pair in zip(repeats, shape, strict=True) for n in pair])
    return k.copied(whole).reshape([n * m for n, m in zip(repeats, shape, strict=True)])


@repeat.cuda_vjp("generated", "input", when=lambda input: floating(input))
def _(k: Launcher, g: Array, input_shape: Shape, repeats: Sequence[int]) -> Array:
    if not g.size:
        return k.xp.zeros(input_shape, g.dtype)
    shape = (1,) * (len(repeats) - len(input_shape)) + input_shape
    apart = g.reshape([n for pair in zip(repeats, shape, strict=True) for n in pair])
    return sum_over(k, apart, range(0, 2 * len(repeats), 2)).reshape(input_shape)


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
    inner = g[_inside(widths, g.shape)]
    if all(min(pair) >= 0 for pair in widths):
        return inner
    return xp.pad(inner, [(max(-a, 0), max(-b, 0)) for a, b in widths])


def _inside(widths: list[tuple[int, int]], padded: Shape) -> tuple[slice, ...]:
    """Where the input lies in the padded tensor."""
    return tuple(slice(max(a, 0), n - max(b, 0)) for (a, b), n in zip(widths, padded, strict=True))


def _no_frame(input: Array, pad: Sequence[int], mode: str) -> str:
    if mode != "constant" or min(pad, default=0) < 0:
        return "only constant padding, and nothing cut off"
    return no_copies(input) or ("" if input.size else "nothing to copy")


@pad.cuda("copies", when=_no_frame)
def _(k: Launcher, input: Array, pad: Sequence[int], value: float | None) -> Array:
    widths = _widths(pad, input.ndim)
    shape = [a + n + b for (a, b), n in zip(widths, input.shape, strict=True)]
    return k.framed(input, shape, _inside(widths, tuple(shape)), value or 0.0)


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
pad.perf_samples(sample((3, 40, 33, 31), (0, 1, 2, 1)), sample((70, 128), (8, 0, 1, 2), value=1.5))
pad.errors(
    ErrorSample(sample((2, 3), (1,)), ShapeError, "two numbers for each"),
    ErrorSample(sample((2, 3), (-2, -2)), ShapeError, r"\(-2, -2\) cuts more off \(2, 3\) than there is"),
    ErrorSample(sample((1, 2, 3), (3, 0), "reflect"), ShapeError, "must be at most 2, got"),
    ErrorSample(sample((1, 2, 3), (1, 0), "mirror"), ValueError, "got 'mirror'"),
)


@primitive(torch="repeat_interleave", data_movement=True)
def repeat_interleave(xp: Namespace, input: Array, repeats: int, dim: int | None = None) -> Array:
    """Each element so many times in a row along dim; without dim, flattened"""
    if not isinstance(repeats, int) or repeats < 0:
        raise ShapeError(f"repeat_interleave: expected one number of repeats of at least 0, got {repeats!r}")
    if dim is None or not input.ndim:
        return xp.repeat(input.reshape(-1), repeats)
    return xp.repeat(input, repeats, axis=axis(dim, input.ndim, "repeat_interleave"))


def _not_repeated(input: Array, repeats: int) -> str:
    return no_copies(input) if isinstance(repeats, int) and repeats >= 0 else "a number of repeats that is refused"


@repeat_interleave.cuda("copies", when=_not_repeated)
def _(k: Launcher, input: Array, repeats: int, dim: int | None) -> Array:
    x = input.reshape(-1) if dim is None or not input.ndim else input
    at = 0 if x is not input or dim is None else axis(dim, x.ndim, "repeat_interleave")
    spread = k.xp.broadcast_to(k.xp.expand_dims(x, at + 1), (*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return k.copied(spread).reshape(*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :])


@repeat_interleave.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Sequence[int], repeats: int, dim: int | None) -> Array:
    shape = [math.prod(input_shape)] if dim is None or not input_shape else list(input_shape)
    at = 0 if dim is None or not input_shape else axis(dim, len(shape), "repeat_interleave")
    return accurate_sum(xp.sum, g.reshape([*shape[: at + 1], repeats, *shape[at + 1 :]]), (at + 1,), False).reshape(
        input_shape
    )


@repeat_interleave.cuda_vjp("generated", "input", when=lambda input: floating(input))
def _(k: Launcher, g: Array, input_shape: Shape, repeats: int, dim: int | None) -> Array:
    if not g.size:
        return k.xp.zeros(input_shape, g.dtype)
    at = len(input_shape) - 1 if dim is None or not input_shape else axis(dim, len(input_shape), "repeat_interleave")
    apart = g.reshape([*input_shape[: at + 1], repeats, *input_shape[at + 1 :]])
    return sum_over(k, apart, [at + 1]).reshape(input_shape)


repeat_interleave.samples(
    sample((2, 3), 2), sample((2, 3), 3, 0), sample((2, 3, 2), 2, -1), sample((2, 3), 0, 1), sample((), 3)
)
repeat_interleave.perf_samples(sample((3, 8, 50, 64), 4, 1), sample((3, 70, 33), 3, -1))
repeat_interleave.errors(
    ErrorSample(sample((2, 3), 2, 2), ShapeError, "dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample((2, 3), -1), ShapeError, "expected one number of repeats of at least 0, got -1"),
)
