"""Dims as PyTorch's arguments name them: counted from either end; one, several, or None for all. And sums over some."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import Namespace
from ...sums import leading_sum

Dims = int | Sequence[int] | None
Shape = tuple[int, ...]


def axis(dim: int, ndim: int, op: str) -> int:
    """Returns `dim` counted from the front; a 0-d tensor has 0 and -1. Raises ShapeError, TypeError for a bool."""
    if isinstance(dim, (bool, np.bool_)):
        raise TypeError(f"{op}: expected a whole number for the dim, got {dim}")
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ShapeError(f"{op}: dim {dim} is outside a tensor of {ndim} dims")
    return dim % max(ndim, 1)


def size_along(shape: Shape, dim: int, op: str) -> int:
    """Returns the size of `dim`. Raises ShapeError if there is no such dim; a 0-d tensor has none."""
    at_least(1, shape, op)
    return shape[axis(dim, len(shape), op)]


def at_least(dims: int, shape: Shape, op: str) -> None:
    """Raises ShapeError for a tensor of fewer dims."""
    if len(shape) < dims:
        raise ShapeError(f"{op}: expected a tensor of at least {dims} dim{'s' * (dims > 1)}, got one of shape {shape}")


def axes(dim: Dims, ndim: int, op: str) -> tuple[int, ...]:
    """Returns the dims that `dim` names from the front, all for None and (). ShapeError for a wrong or repeated one."""
    given = (dim,) if isinstance(dim, (int, np.integer, np.bool_)) else tuple(dim or range(ndim))
    found = tuple(axis(d, ndim, op) for d in given)
    if len(set(found)) != len(found):
        raise ShapeError(f"{op}: a dim appears twice in {given}")
    return found if ndim else ()


def class_dim(shape: Shape) -> int:
    """Returns the dim of a loss's classes: 1 of (B, C, ...), 0 of (C,)."""
    return 0 if len(shape) == 1 else 1


def spread(xp: Namespace, g: Array, shape: Shape, dims: tuple[int, ...], keepdim: bool) -> Array:
    """Returns the gradient of a reduction of `shape` over `dims`, broadcast back to that shape (a view, no copy)."""
    if not keepdim:
        for d in sorted(dims):
            g = xp.expand_dims(g, d)
    return xp.broadcast_to(g, shape)


def sum_to_channels(xp: Namespace, g: Array, layout: str) -> Array:
    """(C,): the sum of `g`, images in `layout`, over everything but the channels. It is the gradient of a bias."""
    if layout == "NHWC":
        return leading_sum(g, g.ndim - 1, g.dtype)
    return xp.sum(g, axis=tuple(i for i in range(g.ndim) if i != 1))
