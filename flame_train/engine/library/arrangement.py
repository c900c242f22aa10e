"""Elements in another order: pixels in channels, triangles, flips, rolls and repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import ShapeError
from ..arguments import named
from ..autograd.grad_target import GradTargets
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, compute_dtype, float32
from ..namespace import Namespace
from ..op import ErrorSample, Op, composite, primitive, sample
from ..op_samples import booleans, integers, no_such_dim
from ..ops.common.conditions import AT_MOST_FP32, floating, no_copies, same
from ..ops.common.dims import Shape, at_least, axes, axis, size_along
from ..ops.common.elementwise_codegen import broadcast_grad
from ..ops.common.row_kernels import sum_over
from ..ops.shape.concat import split
from ..sums import accurate_sum
from ..tensors.tensor import Tensor


@primitive(torch="nn.functional.pixel_shuffle", data_movement=True)
def pixel_shuffle(xp: Namespace, input: Array, upscale_factor: int, layout: str = "NCHW") -> Array:
    """Channels in groups of r * r spread over r x r pixels each, r = upscale_factor (arXiv 1609.05158)"""
    return _copied(xp, input, *_shuffled(input, upscale_factor, layout))


def _shuffled(input: Array, factor: int, layout: str) -> tuple[Array, Shape]:
    """Returns a view of `input` with the entries in the order of pixel_shuffle's result, and the result's shape."""
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
    """Returns a view of `input` with the entries in the order of pixel_unshuffle's result, and the result's shape."""
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


@primitive(torch="triu", accepts_integers=True)
def triu(xp: Namespace, input: Array, diagonal: int = 0) -> Array:
    """The entries on and above the diagonal of the last two dims, zeros below"""
    return xp.where(_above(xp, input.shape, diagonal), input, xp.zeros((), input.dtype))


@primitive(torch="tril", accepts_integers=True)
def tril(xp: Namespace, input: Array, diagonal: int = 0) -> Array:
    """The entries on and below the diagonal of the last two dims, zeros above"""
    return xp.where(_above(xp, input.shape, diagonal + 1), xp.zeros((), input.dtype), input)


def _above(xp: Namespace, shape: Shape, diagonal: int) -> Array:
    """Returns True where column - row >= diagonal, (rows, columns)."""
    at_least(2, shape, "triu, tril")
    return xp.arange(shape[-1])[None, :] - xp.arange(shape[-2])[:, None] >= diagonal


triu.vjp("input")(lambda xp, g, diagonal: xp.where(_above(xp, g.shape, diagonal), g, 0))

tril.vjp("input")(lambda xp, g, diagonal: xp.where(_above(xp, g.shape, diagonal + 1), 0, g))


def _no_triangle(input: Array) -> str:
    if input.ndim < 2 or max(input.shape[-2:]) > 1 << 23:
        return "fewer than 2 dims, or places that fp32 does not count"
    return same(AT_MOST_FP32, input)


def _triangle_kernels(op: Op, kept: str) -> None:
    """The op's kernels and its gradient's, by the condition under which an entry is kept."""

    def forward(k: Launcher, input: Array, diagonal: int) -> Array:
        operands = {"input": input, **_places(k, input.shape), "diagonal": diagonal}
        return k.elementwise((f"{kept} ? input : 0.f",), operands, (input.dtype,))[0]

    def backward(k: Launcher, g: Array, diagonal: int, targets: GradTargets) -> Array:
        operands = {"g": g, **_places(k, g.shape), "diagonal": diagonal}
        return broadcast_grad(k, f"{kept} ? g : 0.f", operands, g.shape, targets["input"])

    op.cuda("generated", when=_no_triangle)(forward)
    op.cuda_vjp("generated", "input", when=_no_triangle)(backward)


def _places(k: Launcher, shape: Shape) -> dict[str, Array]:
    """Returns the row and the column of each entry, as numbers that broadcast over the last two dims."""
    rows, columns = (k.xp.arange(n, dtype=float32) for n in shape[-2:])
    return {"row": rows[:, None], "column": columns[None]}


_triangle_kernels(triu, "column - row >= diagonal")

_triangle_kernels(tril, "column - row <= diagonal")

for _op in (triu, tril):
    _op.perf_samples(sample((3, 70, 133), 5), sample((300, 77), -3))

for _op in (triu, tril):
    _op.samples(
        sample((3, 4)), sample((2, 4, 3), 1), sample((4, 4), -2), sample(booleans(3, 4), 1), sample(integers(9, 4, 3))
    )
    _op.errors(ErrorSample(sample((3,)), ShapeError, "at least 2 dims"))


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


@composite(torch="t")
def t(input: Tensor) -> Tensor:
    """A matrix with rows and columns exchanged; a vector or a number as it is"""
    if input.ndim > 2:
        raise ShapeError(f"t: expected a tensor of at most 2 dims, got {input.ndim}; mT takes more")
    return input.transpose(0, 1) if input.ndim == 2 else input.view(input.shape)


t.samples(sample((2, 3)), sample((3,)), sample(()))

t.errors(ErrorSample(sample((2, 3, 4)), ShapeError, "t: expected a tensor of at most 2 dims, got 3"))


@primitive(torch="movedim", views=True)
def movedim(xp: Namespace, input: Array, source: int | Sequence[int], destination: int | Sequence[int]) -> Array:
    """input with the dims at source put at destination, the others in order around them"""
    return _moved(xp, input, source, destination)


def _moved(xp: Namespace, x: Array, source: int | Sequence[int], destination: int | Sequence[int]) -> Array:
    return xp.moveaxis(x, axes(source, x.ndim, "movedim"), axes(destination, x.ndim, "movedim"))


movedim.vjp("input")(lambda xp, g, source, destination: _moved(xp, g, destination, source))

movedim.errors(no_such_dim(0))

movedim.samples(sample((2, 3, 4), 0, 2), sample((2, 3, 4), (0, -1), (1, 0)), sample((), 0, -1))


@composite(torch="unbind", multiple=True)
def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices along dim, without it"""
    size_along(input.shape, dim, "unbind")
    return tuple(piece.squeeze(dim) for piece in split(input, 1, dim)) if input.shape[dim] else ()


unbind.samples(sample((3, 2)), sample((2, 3, 4), -1))

unbind.errors(
    ErrorSample(sample((2, 3), 2), ShapeError, "dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample(()), ShapeError, "at least 1 dim"),
)
