"""Putting tensors together and taking them apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, promote, promote_floats
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common.conditions import floating
from ..common.dims import Shape, axis, size_along


@primitive(torch="cat", data_movement=True)
def cat(xp: Namespace, tensors: Sequence[Array], dim: int = 0) -> Array:
    """The tensors one after another along dim"""
    check_alike(tensors, dim)
    return xp.concatenate(_of_one_dtype(tensors), axis=dim)


def _of_one_dtype(tensors: Sequence[Array]) -> Sequence[Array]:
    """The tensors in their promoted floating dtype, if one of them is floating; else as they are."""
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
