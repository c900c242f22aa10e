"""Indexing with brackets, as torch.Tensor has it, and `narrow`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, primitive, sample
from ..tensor import Tensor
from .dims import Shape
from .index import added_at


@primitive(torch="Tensor.__getitem__", moves=True)
def getitem(xp: Any, input: Array, index: Any) -> Array:
    """input[index], for whole numbers, slices, None, ..., and tensors or lists of whole numbers or truth values"""
    return input[_plain(xp, index)]


@getitem.vjp("input")
def _(xp: Any, g: Array, input_shape: Shape, index: Any) -> Array:
    places = _plain(xp, index)
    if any(hasattr(p, "dtype") for p in places):
        return added_at(xp, input_shape, places, g)
    out = xp.zeros(input_shape, g.dtype)
    out[places] = g
    return out


def _plain(xp: Any, index: Any) -> tuple[Any, ...]:
    """The index as a tuple without Tensors, lists or masks: a mask becomes the places where it holds."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, bool):
            raise ShapeError("getitem: a single True or False is no index here; use unsqueeze or a mask")
        if part is None or isinstance(part, (int, slice, type(...))):
            parts.append(part)
            continue
        array = xp.asarray(part.data if isinstance(part, Tensor) else np.asarray(part))
        if array.dtype == bool:
            parts.extend(xp.nonzero(array))
        elif array.dtype.kind in "iu":
            parts.append(array)
        else:
            raise ShapeError(f"getitem: expected whole numbers or truth values as index, got {array.dtype.name}")
    return tuple(parts)


@getitem.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), 1)
    yield sample((4, 3, 2), (slice(None), slice(0, 2), None))
    yield sample((4, 3), (..., slice(None, None, 2)))
    yield sample((4, 3), [0, 2, 0])
    yield sample((4, 3, 2), Tensor(np.array([[0, 3], [1, 0]])))
    yield sample((4, 3, 2), (slice(None), Tensor(np.array([0, 2])), Tensor(np.array([1, 1]))))
    yield sample((4, 3, 2), (Tensor(np.array([0, 3, 3])), slice(1, 3), 0))
    yield sample((2, 3), Tensor(np.array([[True, False, True], [False, False, True]])))
    yield sample((2, 3, 2), (slice(None), Tensor(np.array([True, False, True]))))


@getitem.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), Tensor(np.array([0.5]))), ShapeError, "whole numbers or truth values")
    yield ErrorSample(sample((2, 3), True), ShapeError, "a single True or False")


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


@narrow.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 5), 1, 3, 3), ShapeError, "is outside dim 1 of size 5")
