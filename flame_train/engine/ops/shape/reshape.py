"""Other shapes for the same data. Results are views where NumPy gives views; nobody writes into them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common.conditions import floating
from ..common.dims import Shape, axes, axis
from ..common.row_kernels import sum_over


@primitive(torch="reshape", views=True)
def reshape(xp: Namespace, input: Array, shape: Sequence[int]) -> Array:
    """input's elements in row-major order under another shape; one size may be -1"""
    if sum(n == -1 for n in shape) > 1 or min(shape, default=0) < -1:
        raise ShapeError(f"reshape: expected sizes of 0 or more and at most one -1, got {tuple(shape)}")
    known = math.prod(n for n in shape if n != -1)
    fits = input.size % known == 0 if -1 in shape and known else input.size == known
    if not fits:
        raise ShapeError(f"reshape: {tuple(input.shape)} has {input.size} elements, which do not fit {tuple(shape)}")
    if -1 in shape and not known:
        raise ShapeError(f"reshape: the -1 in {tuple(shape)} cannot be told from 0 elements; give that size")
    return input.reshape(tuple(shape))


reshape.vjp("input")(lambda xp, g, input_shape: g.reshape(input_shape))

reshape.samples(sample((2, 6), (3, 4)), sample((2, 3, 4), (6, -1)), sample((0, 3), (3, 0)))

reshape.errors(
    ErrorSample(sample((2, 3), (4, 2)), ShapeError, r"has 6 elements, which do not fit \(4, 2\)"),
    ErrorSample(sample((2, 3), (-1, -1)), ShapeError, r"at most one -1, got \(-1, -1\)"),
    ErrorSample(sample((0, 3), (0, -1)), ShapeError, "cannot be told from 0 elements"),
)


@composite(torch="Tensor.view")
def view(input: Tensor, shape: Sequence[int]) -> Tensor:
    """reshape(input, shape); unlike PyTorch's it copies where no view is possible, instead of refusing"""
    return input.reshape(shape)


view.errors(ErrorSample(sample((2, 3), (4, 2)), ShapeError, r"has 6 elements, which do not fit \(4, 2\)"))

view.samples(sample((2, 6), (3, -1)))


@composite(torch="flatten")
def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """The dims from start_dim to end_dim as one"""
    if input.ndim == 0:
        return input.reshape(1)
    first, last = axis(start_dim, input.ndim, "flatten"), axis(end_dim, input.ndim, "flatten")
    if last < first:
        raise ShapeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    middle = math.prod(input.shape[first : last + 1])
    return input.reshape(*input.shape[:first], middle, *input.shape[last + 1 :])


flatten.samples(sample((2, 3, 4)), sample((2, 3, 4), 1), sample((0, 4, 3), 1))

flatten.errors(ErrorSample(sample((2, 3), 1, 0), ShapeError, "start_dim 1 comes after end_dim 0"))


@primitive(torch="permute", views=True)
def permute(xp: Namespace, input: Array, dims: Sequence[int]) -> Array:
    """input's dims in the order given"""
    if sorted(axis(d, input.ndim, "permute") for d in dims) != list(range(input.ndim)):
        raise ShapeError(f"permute: {tuple(dims)} does not name each of {input.ndim} dims once")
    return xp.transpose(input, tuple(dims))


permute.vjp("input")(lambda xp, g, dims: xp.transpose(g, tuple(np.argsort([d % len(dims) for d in dims]).tolist())))

permute.samples(sample((2, 3, 4), (2, 0, 1)), sample((2, 3, 4), (0, -1, 1)))

permute.errors(ErrorSample(sample((2, 3), (0, 0)), ShapeError, "does not name each of 2 dims once"))


@primitive(torch="transpose", views=True)
def transpose(xp: Namespace, input: Array, dim0: int, dim1: int) -> Array:
    """input with two dims exchanged"""
    return _exchanged(xp, input, dim0, dim1)


def _exchanged(xp: Namespace, x: Array, dim0: int, dim1: int) -> Array:
    first, second = axis(dim0, x.ndim, "transpose"), axis(dim1, x.ndim, "transpose")
    return xp.swapaxes(x, first, second) if x.ndim else x


transpose.vjp("input")(lambda xp, g, dim0, dim1: _exchanged(xp, g, dim0, dim1))

transpose.samples(sample((2, 3, 4), 0, -1))

transpose.errors(ErrorSample(sample((2, 3), 0, 2), ShapeError, "transpose: dim 2 is outside a tensor of 2 dims"))


@primitive(torch="squeeze", views=True)
def squeeze(xp: Namespace, input: Array, dim: int | Sequence[int] | None = None) -> Array:
    """input without those of its dims (all, or the ones named) whose size is 1"""
    dims = axes(dim, input.ndim, "squeeze") if dim != () else ()
    return xp.squeeze(input, tuple(d for d in dims if input.shape[d] == 1))


squeeze.vjp("input")(lambda xp, g, input_shape: g.reshape(input_shape))

squeeze.samples(sample((2, 1, 3), 1), sample((2, 1, 3), 0), sample((1, 2, 1)), sample((1, 2, 1), (0, 1)))

squeeze.errors(ErrorSample(sample((2, 1), 2), ShapeError, "squeeze: dim 2 is outside a tensor of 2 dims"))


@primitive(torch="unsqueeze", views=True)
def unsqueeze(xp: Namespace, input: Array, dim: int) -> Array:
    """input with a dim of size 1 put in at dim"""
    return xp.expand_dims(input, axis(dim, input.ndim + 1, "unsqueeze"))


unsqueeze.vjp("input")(lambda xp, g, input_shape: g.reshape(input_shape))

unsqueeze.errors(ErrorSample(sample((2, 3), 3), ShapeError, "unsqueeze: dim 3 is outside a tensor of 3 dims"))

unsqueeze.samples(sample((2, 3), 1), sample((2, 3), -1))


@primitive(torch="Tensor.expand", data_movement=True)
def expand(xp: Namespace, input: Array, shape: Sequence[int]) -> Array:
    """input repeated along its dims of size 1 to shape; -1 keeps a size"""
    lead = len(shape) - input.ndim
    possible = lead >= 0 and -1 not in tuple(shape)[:lead]
    full = [input.shape[i - lead] if n == -1 else n for i, n in enumerate(shape)] if possible else []
    if not possible or any(n not in (1, m) for n, m in zip(input.shape, full[lead:], strict=True)):
        raise ShapeError(f"expand: {tuple(input.shape)} does not expand to {tuple(shape)}")
    return xp.broadcast_to(input, tuple(full))


@expand.vjp("input")
def _(xp: Namespace, g: Array) -> Array:
    return g  # summed down to the input's shape in graph.py, like every gradient


@expand.cuda_vjp("generated", "input", when=lambda input: floating(input))
def _(k: Launcher, g: Array, input_shape: Shape) -> Array:
    lead = g.ndim - len(input_shape)
    dims = [i for i, n in enumerate(g.shape) if i < lead or input_shape[i - lead] != n]
    return sum_over(k, g, dims).reshape(input_shape) if g.size else g


expand.perf_samples(sample((3, 1, 40), (3, 700, 40)), sample((5, 1, 33), (2, 5, 60, 33)))

expand.samples(sample((3, 1), (2, 3, 4)), sample((1, 4), (3, -1)))

expand.errors(
    ErrorSample(sample((2, 3), (4, 3)), ShapeError, r"\(2, 3\) does not expand to \(4, 3\)"),
    ErrorSample(sample((2, 3), (-1, 2, 3)), ShapeError, r"\(2, 3\) does not expand to \(-1, 2, 3\)"),
    ErrorSample(sample((2, 3), (3,)), ShapeError, r"\(2, 3\) does not expand to \(3,\)"),
)
