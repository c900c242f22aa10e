"""Indexing, x[index], as torch.Tensor has it, and `narrow`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...tensors.indexing import Places, steps
from ...tensors.tensor import Tensor
from ..common.conditions import no_copies
from ..common.dims import Shape, size_along
from .embedding import added_at


@primitive(torch="Tensor.__getitem__", data_movement=True)
def getitem(xp: Namespace, input: Array, index: Any) -> Array:
    """input[index], for whole numbers, slices, None, ..., and tensors or lists of whole numbers or truth values"""
    first, rest = _steps(xp, index, input.shape)
    return input[first][rest] if rest else input[first]


@getitem.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, index: Any, targets: GradTargets) -> Array:
    first, rest = _steps(xp, index, input_shape)
    target = targets["input"]
    if not rest:
        return _spread(xp, g, input_shape, first, target)
    if not first:
        return target.total(added_at(xp, input_shape, rest, g))
    out = xp.zeros(input_shape, g.dtype)
    out[first] = added_at(xp, out[first].shape, rest, g)
    return target.total(out)


def _spread(xp: Namespace, g: Array, shape: Shape, places: Places, target: GradTarget) -> Array:
    """Returns `g` at its places in a gradient of `shape`: added to what has arrived there, or among zeros."""
    if target.addend is None:
        out = xp.zeros(shape, g.dtype)
        out[places] = g
        return out
    if target.addend.dtype != g.dtype:
        return target.total(_spread(xp, g, shape, places, ALLOCATE))
    out = target.addend if target.overwrites else target.addend.copy(order="K")
    out[places] += g
    return out


def _framed(k: Launcher, g: Array, shape: Shape, places: Sequence[slice], target: GradTarget) -> Array:
    """Spreads as `_spread`, by our kernels."""
    if target.addend is None or target.addend.dtype != g.dtype:
        return target.total(k.framed(g, shape, places))
    out: Array = target.addend if target.overwrites else k.copied(target.addend)
    part = out[tuple(places)]
    k.elementwise(("g + addend",), {"g": g, "addend": part}, (out.dtype,), part.shape, (part,))
    return out


def _slices(index: Any, shape: Shape) -> list[slice] | None:
    """Returns the part of each dim that basic indexing takes, one place as a slice of 1; else None."""
    parts = list(index if isinstance(index, tuple) else (index,))
    if any(not isinstance(p, slice) and type(p) is not int for p in parts) or len(parts) > len(shape):
        return None
    found = []
    for part, n in zip([*parts, *[slice(None)] * (len(shape) - len(parts))], shape, strict=True):
        first = part if isinstance(part, slice) else slice(part, part + 1 or None)
        begin, end, step = first.indices(n)
        if step != 1 or end <= begin:
            return None
        found.append(slice(begin, end))
    return found


def _no_part(input: Array, index: Any) -> str:
    return no_copies(input) if _slices(index, input.shape) else "only whole numbers, and slices with a step of 1"


@getitem.cuda_vjp("copies", "input", when=_no_part)
def _(k: Launcher, g: Array, input_shape: Shape, index: Any, targets: GradTargets) -> Array:
    places = _slices(index, input_shape)
    assert places is not None  # the guard saw to it
    kept = g.reshape([s.stop - s.start for s in places])
    return _framed(k, kept, input_shape, places, targets["input"])


def _steps(xp: Namespace, index: Any, shape: Shape) -> tuple[Places, Places]:
    parts = index if isinstance(index, tuple) else (index,)
    return steps(xp, tuple([p.data if isinstance(p, Tensor) else p for p in parts]), shape)


getitem.samples(
    sample((4, 3), 1),
    sample((4, 3, 2), (slice(None), slice(0, 2), None)),
    sample((4, 3), (..., slice(None, None, 2))),
    sample((4, 3), [0, 2, 0]),
    sample((4, 3, 2), Tensor(np.array([[0, 3], [1, 0]]))),
    sample((4, 3, 2), (slice(None), Tensor(np.array([0, 2])), Tensor(np.array([1, 1])))),
    sample((4, 3, 2), (Tensor(np.array([0, 3, 3])), slice(1, 3), 0)),
    sample((2, 3), Tensor(np.array([[True, False, True], [False, False, True]]))),
    sample((2, 3, 2), (slice(None), Tensor(np.array([True, False, True])))),
    sample((2, 3, 4), (0, slice(None), [0, 2])),
    sample((2, 3, 4, 2), (-1, None, slice(1, 3), Tensor(np.array([[3, 0], [1, 1]])))),
    sample((4, 2, 3), (Tensor(np.array([0, 3, 3])), ..., Tensor(np.array(1)))),
    sample((2, 3, 4), (slice(None), Tensor(np.array(2)), [0, 0, 3])),
    sample((2, 3), (slice(None), [])),
)


getitem.perf_samples(sample((3, 70, 129), (slice(None), slice(12, None))), sample((3, 70, 64), (..., slice(8, 40))))


def _getitem_errors() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), Tensor(np.array([0.5]))), ShapeError, "whole numbers or truth values")
    for single in (True, Tensor(np.array(True))):
        yield ErrorSample(sample((2, 3), single), ShapeError, "a single True or False")
    for wrong in ((4,), (1,), (2, 2)):  # must be refused by shape, as a GPU checks no positions
        yield ErrorSample(sample((2, 3), Tensor(np.ones(wrong, bool))), ShapeError, "expected a mask of shape")
    yield ErrorSample(sample((3, 0), (slice(None), Tensor(np.array([0])))), IndexError, "a dim of size 0")


getitem.errors(*_getitem_errors())


@primitive(torch="narrow", data_movement=True)
def narrow(xp: Namespace, input: Array, dim: int, start: int, length: int) -> Array:
    """length entries of dim, from start

    Args:
        dim: the dim along which it works.
        start: the first index along dim.
        length: the number of them.

    Returns:
        A view of the input.
    """
    return input[_window(input.shape, dim, start, length)]


def _window(shape: Shape, dim: int, start: int, length: int) -> tuple[slice, ...]:
    n = size_along(shape, dim, "narrow")
    first = start + n if start < 0 else start
    if first < 0 or length < 0 or first + length > n:
        raise ShapeError(f"narrow: [{start}, {start + length}) is outside dim {dim} of size {n}")
    index = [slice(None)] * len(shape)
    index[dim] = slice(first, first + length)
    return tuple(index)


@narrow.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, dim: int, start: int, length: int, targets: GradTargets) -> Array:
    return _spread(xp, g, input_shape, _window(input_shape, dim, start, length), targets["input"])


@narrow.cuda_vjp("copies", "input", when=lambda input: no_copies(input) or ("" if input.size else "nothing to copy"))
def _(k: Launcher, g: Array, input_shape: Shape, dim: int, start: int, length: int, targets: GradTargets) -> Array:
    sizes = zip(_window(input_shape, dim, start, length), input_shape, strict=True)
    return _framed(k, g, input_shape, [slice(*s.indices(n)[:2]) for s, n in sizes], targets["input"])


narrow.samples(sample((4, 5), 1, 1, 3), sample((4, 5), 0, 0, 4), sample((4, 5), 1, -3, 2))
narrow.perf_samples(sample((3, 70, 129), 2, 1, 64), sample((70, 300), 0, 3, 40))
narrow.errors(
    ErrorSample(sample((4, 5), 1, 3, 3), ShapeError, "is outside dim 1 of size 5"),
    ErrorSample(sample((4, 5), 1, -6, 1), ShapeError, "is outside dim 1 of size 5"),
    ErrorSample(sample((), 0, 0, 1), ShapeError, "narrow: expected a tensor of at least 1 dim"),
)
