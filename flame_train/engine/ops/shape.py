"""Ops that only move data. Results are views where NumPy gives views; nobody writes into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..tensor import Tensor
from .index import scatter_add

Shape = tuple[int, ...]


@primitive(torch="reshape", moves=True)
def reshape(xp: Any, input: Array, shape: Sequence[int]) -> Array:
    """input's elements in row-major order under another shape; one size may be -1"""
    known = math.prod(n for n in shape if n != -1)
    fits = input.size % known == 0 if -1 in shape and known else input.size == known
    if not fits:
        raise ShapeError(f"reshape: {tuple(input.shape)} has {input.size} elements, which do not fit {tuple(shape)}")
    return input.reshape(tuple(shape))


@reshape.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape) -> Array:
    return g.reshape(input_shape)


@reshape.samples
def _() -> Iterator[Sample]:
    yield sample((2, 6), (3, 4))
    yield sample((2, 3, 4), (6, -1))
    yield sample((0, 3), (3, 0))


@reshape.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (4, 2)), ShapeError, r"has 6 elements, which do not fit \(4, 2\)")


@composite(torch="flatten")
def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """The dims from start_dim to end_dim as one"""
    first, last = start_dim % input.ndim, end_dim % input.ndim
    return input.reshape(*input.shape[:first], -1, *input.shape[last + 1 :])


@flatten.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4))
    yield sample((2, 3, 4), 1)


@primitive(torch="permute", moves=True)
def permute(xp: Any, input: Array, dims: Sequence[int]) -> Array:
    """input's dims in the order given"""
    return xp.transpose(input, tuple(dims))


@permute.vjp("input")
def _(xp: Any, g: Array, dims: Sequence[int]) -> Array:
    return xp.transpose(g, tuple(np.argsort([d % len(dims) for d in dims]).tolist()))


@permute.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4), (2, 0, 1))
    yield sample((2, 3, 4), (0, -1, 1))


@primitive(torch="transpose", moves=True)
def transpose(xp: Any, input: Array, dim0: int, dim1: int) -> Array:
    """input with two dims exchanged"""
    return xp.swapaxes(input, dim0, dim1)


@transpose.vjp("input")
def _(xp: Any, g: Array, dim0: int, dim1: int) -> Array:
    return xp.swapaxes(g, dim0, dim1)


@transpose.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4), 0, -1)


@primitive(torch="squeeze", moves=True)
def squeeze(xp: Any, input: Array, dim: int) -> Array:
    """input without dim, if its size is 1"""
    return xp.squeeze(input, dim) if input.shape[dim] == 1 else input


@squeeze.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape) -> Array:
    return g.reshape(input_shape)


@squeeze.samples
def _() -> Iterator[Sample]:
    yield sample((2, 1, 3), 1)
    yield sample((2, 1, 3), 0)


@primitive(torch="unsqueeze", moves=True)
def unsqueeze(xp: Any, input: Array, dim: int) -> Array:
    """input with a dim of size 1 put in at dim"""
    return xp.expand_dims(input, dim)


@unsqueeze.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape) -> Array:
    return g.reshape(input_shape)


@unsqueeze.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3), 1)
    yield sample((2, 3), -1)


@primitive(torch="expand", moves=True)
def expand(xp: Any, input: Array, shape: Sequence[int]) -> Array:
    """input repeated along its dims of size 1 to shape; -1 keeps a size"""
    lead = len(shape) - input.ndim
    full = [input.shape[i - lead] if n == -1 else n for i, n in enumerate(shape)]
    return xp.broadcast_to(input, tuple(full))


@expand.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g  # summed down to the input's shape where every gradient is


@expand.samples
def _() -> Iterator[Sample]:
    yield sample((3, 1), (2, 3, 4))
    yield sample((1, 4), (3, -1))


@primitive(torch="cat", moves=True)
def cat(xp: Any, tensors: Sequence[Array], dim: int = 0) -> Array:
    """The tensors one after another along dim"""
    return xp.concatenate(tensors, axis=dim)


@cat.vjp("tensors")
def _(xp: Any, g: Array, tensors_shape: list[Shape], dim: int) -> list[Array]:
    ends = np.cumsum([shape[dim] for shape in tensors_shape])[:-1].tolist()
    return list(xp.split(g, ends, axis=dim))


@cat.samples
def _() -> Iterator[Sample]:
    yield sample([(2, 3), (1, 3), (4, 3)])
    yield sample([(2, 3), (2, 5)], -1)


@primitive(torch="stack", moves=True)
def stack(xp: Any, tensors: Sequence[Array], dim: int = 0) -> Array:
    """The tensors side by side along a new dim"""
    return xp.stack(tensors, axis=dim)


@stack.vjp("tensors")
def _(xp: Any, g: Array, dim: int) -> list[Array]:
    return [xp.take(g, i, axis=dim) for i in range(g.shape[dim])]


@stack.samples
def _() -> Iterator[Sample]:
    yield sample([(2, 3), (2, 3)])
    yield sample([(2, 3), (2, 3), (2, 3)], 1)


@primitive(torch="split", moves=True, multiple=True)
def split(xp: Any, tensor: Array, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Array, ...]:
    """Pieces of the given size along dim, or of the given sizes; the last may be smaller"""
    n = tensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        ends = list(range(split_size_or_sections, n, split_size_or_sections))
    else:
        ends = np.cumsum(split_size_or_sections)[:-1].tolist()
        if int(np.sum(split_size_or_sections)) != n:
            raise ShapeError(
                f"split: sections {tuple(split_size_or_sections)} do not add up to {n}, the size of dim {dim}"
            )
    return tuple(xp.split(tensor, ends, axis=dim))


@split.vjp("tensor")
def _(xp: Any, g: tuple[Array, ...], dim: int) -> Array:
    return xp.concatenate(g, axis=dim)


@split.samples
def _() -> Iterator[Sample]:
    yield sample((5, 3), 2)
    yield sample((2, 6), (1, 2, 3), 1)


@composite(torch="chunk")
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Up to `chunks` equal pieces along dim, the last one smaller if it must be"""
    return split(input, -(-input.shape[dim] // chunks), dim)


@chunk.samples
def _() -> Iterator[Sample]:
    yield sample((2, 6), 2, -1)
    yield sample((5, 2), 3)


@primitive(torch=None, moves=True)
def getitem(xp: Any, input: Array, index: Any) -> Array:
    """input[index], for whole numbers, slices, None and lists of whole numbers (torch's indexing)"""
    return input[_plain(index)]


@getitem.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, index: Any) -> Array:
    if not _basic(index):
        return scatter_add(xp, input_shape, _plain(index), g)
    out = xp.zeros(input_shape, g.dtype)
    out[_plain(index)] = g
    return out


def _plain(index: Any) -> Any:
    """Tensors inside an index become their arrays."""
    if isinstance(index, tuple):
        return tuple(_plain(i) for i in index)
    return index.data if isinstance(index, Tensor) else index


def _basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(i is None or isinstance(i, (int, slice, type(...))) for i in parts)


@getitem.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), 1)
    yield sample((4, 3, 2), (slice(None), slice(0, 2), None))
    yield sample((4, 3), (..., slice(None, None, 2)))
    yield sample((4, 3), [0, 2, 0])


@primitive(torch="narrow", moves=True)
def narrow(xp: Any, input: Array, dim: int, start: int, length: int) -> Array:
    """length entries of dim, from start"""
    if start < 0 or start + length > input.shape[dim]:
        raise ShapeError(f"narrow: [{start}, {start + length}) is outside dim {dim} of size {input.shape[dim]}")
    return input[_window(input.ndim, dim, start, length)]


def _window(ndim: int, dim: int, start: int, length: int) -> tuple[slice, ...]:
    index = [slice(None)] * ndim
    index[dim] = slice(start, start + length)
    return tuple(index)


@narrow.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, dim: int, start: int, length: int) -> Array:
    out = xp.zeros(input_shape, g.dtype)
    out[_window(g.ndim, dim, start, length)] = g
    return out


@narrow.samples
def _() -> Iterator[Sample]:
    yield sample((4, 5), 1, 1, 3)
    yield sample((4, 5), 0, 0, 4)


@primitive(torch="nn.functional.pad", moves=True)
def pad(xp: Any, input: Array, pad: Sequence[int], value: float = 0.0) -> Array:
    """input with `value` around it; pad = (last dim before, after, next to last before, after, ...)"""
    return xp.pad(input, _widths(pad, input.ndim), constant_values=value)


def _widths(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(pairs)) + pairs[::-1]


@pad.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, pad: Sequence[int]) -> Array:
    widths = _widths(pad, g.ndim)
    return g[tuple(slice(a, a + n) for (a, _), n in zip(widths, input_shape, strict=True))]


@pad.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3), (1, 2))
    yield sample((2, 3, 4), (0, 1, 2, 0))


@primitive(torch="flip", moves=True)
def flip(xp: Any, input: Array, dims: Sequence[int]) -> Array:
    """input in reverse order along dims"""
    return xp.flip(input, tuple(dims))


@flip.vjp("input")
def _(xp: Any, g: Array, dims: Sequence[int]) -> Array:
    return xp.flip(g, tuple(dims))


@flip.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3), (0,))
    yield sample((2, 3, 2), (0, 2))
