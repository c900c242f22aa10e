"""Putting tensors together, taking them apart, and padding them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, promote, promote_floats
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common.conditions import floating, no_copies
from ..common.dims import Shape, axis, size_along
from ..indexing.embedding import added_at


@primitive(torch="cat", data_movement=True)
def cat(xp: Namespace, tensors: Sequence[Array], dim: int = 0) -> Array:
    """The tensors one after another along dim"""
    check_alike(tensors, dim)
    return xp.concatenate(_of_one_dtype(tensors), axis=dim)


def _of_one_dtype(tensors: Sequence[Array]) -> Sequence[Array]:
    """Returns the tensors in their promoted floating dtype, if one of them is floating; else as they are."""
    dtype = promote([t.dtype for t in tensors])
    return tensors if dtype is None else [t.astype(dtype, copy=False) for t in tensors]


@cat.vjp("tensors")
def _(xp: Namespace, g: Array, tensors_shape: list[Shape], dim: int) -> list[Array]:
    ends = np.cumsum([shape[dim] for shape in tensors_shape])[:-1].tolist()
    return list(xp.split(g, ends, axis=dim))


def _floats(tensors: Sequence[Array]) -> str:
    return floating(*tensors)


@cat.cuda("copies", when=_floats)
def _(k: Launcher, tensors: Sequence[Array], dim: int) -> Array:
    check_alike(tensors, dim)
    return k.concatenated(tensors, axis(dim, tensors[0].ndim, "cat"), promote_floats([t.dtype for t in tensors]))


def check_alike(tensors: Sequence[Array], dim: int) -> None:
    """Raises ShapeError unless the shapes are equal but for `dim`."""
    if not tensors:
        raise ShapeError("cat: expected at least one tensor, got none")
    if any(t.ndim == 0 for t in tensors):
        raise ShapeError("cat: expected tensors of at least 1 dim, got a tensor without dims; use stack")
    rest = [tuple(n for i, n in enumerate(t.shape) if i != axis(dim, t.ndim, "cat")) for t in tensors]
    if any(r != rest[0] for r in rest):
        raise ShapeError(f"cat: shapes must be equal but for dim {dim}, got {[tuple(t.shape) for t in tensors]}")


cat.samples(sample([(2, 3), (1, 3), (4, 3)]), sample([(2, 3), (2, 5)], -1))

cat.perf_samples(sample([(2, 9, 7, 64), (2, 9, 7, 40)], -1), sample([(2, 3, 65), (2, 4, 65), (2, 1, 65)], 1))

cat.errors(
    ErrorSample(sample([(2, 3), (3, 2)]), ShapeError, "equal but for dim 0"),
    ErrorSample(sample([(2, 3), (2, 3)], 2), ShapeError, "dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample([(), ()]), ShapeError, "use stack"),
)


@primitive(torch="stack", data_movement=True)
def stack(xp: Namespace, tensors: Sequence[Array], dim: int = 0) -> Array:
    """The tensors side by side along a new dim"""
    check_equal(tensors)
    return xp.stack(_of_one_dtype(tensors), axis=axis(dim, tensors[0].ndim + 1, "stack"))


@stack.vjp("tensors")
def _(xp: Namespace, g: Array, dim: int) -> list[Array]:
    return list(xp.moveaxis(g, dim, 0))


@stack.cuda("copies", when=_floats)
def _(k: Launcher, tensors: Sequence[Array], dim: int) -> Array:
    check_equal(tensors)
    at = axis(dim, tensors[0].ndim + 1, "stack")
    apart = [k.xp.expand_dims(t, at) for t in tensors]
    return k.concatenated(apart, at, promote_floats([t.dtype for t in tensors]))


def check_equal(tensors: Sequence[Array]) -> None:
    """Raises ShapeError unless the shapes are equal."""
    if len({t.shape for t in tensors}) != 1:
        raise ShapeError(f"stack: expected equal shapes, got {[tuple(t.shape) for t in tensors]}")


stack.errors(
    ErrorSample(sample([(2, 3), (3, 2)]), ShapeError, r"stack: expected equal shapes, got .*\(3, 2\)"),
    ErrorSample(sample([(2, 3), (2, 3)], 3), ShapeError, "stack: dim 3 is outside a tensor of 3 dims"),
)

stack.perf_samples(sample([(3, 70, 64)] * 3, 1), sample([(70, 33)] * 2, -1))

stack.samples(sample([(2, 3), (2, 3)]), sample([(2, 3), (2, 3), (2, 3)], 1))


@primitive(torch="split", views=True, multiple=True)
def split(xp: Namespace, tensor: Array, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    """Pieces of the given size along dim, or of the given sizes; the last may be smaller"""
    n = size_along(tensor.shape, dim, "split")
    if isinstance(split_size_or_sections, int):
        if split_size_or_sections < 1 and (n or split_size_or_sections):
            raise ShapeError(f"split: expected pieces of at least 1, got {split_size_or_sections}")
        ends = list(range(split_size_or_sections, n, split_size_or_sections)) if n else []
    else:
        if min(split_size_or_sections, default=0) < 0:
            raise ShapeError(f"split: expected sections of 0 or more, got {tuple(split_size_or_sections)}")
        ends = np.cumsum(split_size_or_sections)[:-1].tolist()
        if int(np.sum(split_size_or_sections)) != n:
            raise ShapeError(
                f"split: sections {tuple(split_size_or_sections)} do not add up to {n}, the size of dim {dim}"
            )
    return tuple(xp.split(tensor, ends, axis=dim))


split.vjp("tensor")(lambda xp, g, dim: xp.concatenate(g, axis=dim))


@split.cuda_vjp("copies", "tensor", when=lambda tensor: floating(tensor), accumulates=False)
def _(k: Launcher, g: tuple[Array, ...], dim: int, targets: GradTargets) -> Array:
    return k.concatenated(g, axis(dim, g[0].ndim, "split"), g[0].dtype, out=targets["tensor"].buffer)


split.samples(sample((5, 3), 2), sample((2, 6), (1, 2, 3), 1))

split.errors(
    ErrorSample(sample((5, 3), (2, 2)), ShapeError, "do not add up to 5"),
    ErrorSample(sample((5, 3), (-1, 6)), ShapeError, "sections of 0 or more, got .-1, 6."),
    ErrorSample(sample((5, 3), 0), ShapeError, "pieces of at least 1, got 0"),
    ErrorSample(sample((), 1), ShapeError, "at least 1 dim, got one of shape ()"),
)


@composite(torch="chunk")
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Up to `chunks` equal pieces along dim, the last one smaller if it must be"""
    if chunks < 1:
        raise ValueError(f"chunk: expected at least one chunk, got {chunks}")
    n = size_along(input.shape, dim, "chunk")
    return split(input, -(-n // chunks) if n else [0] * chunks, dim)


chunk.errors(ErrorSample(sample((2, 3), 0), ValueError, "at least one chunk, got 0"))

chunk.samples(sample((2, 6), 2, -1), sample((5, 2), 3), sample((2, 0), 2, 1))


@primitive(torch="nn.functional.pad", data_movement=True)
def pad(xp: Namespace, input: Array, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Array:
    """input with something around it; pad = (last dim before, after, next to last before, after, ...)

    The something is `value` (0 if not given) in mode "constant". It is input itself mirrored, its border repeated or
    its other end in modes "reflect", "replicate" and "circular". Negative numbers cut off.

    Args:
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
    """Returns where the input lies in the padded tensor."""
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
