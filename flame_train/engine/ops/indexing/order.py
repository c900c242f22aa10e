"""Values in order, and the first few of that order. NaN counts as larger than every number, as in PyTorch."""

from __future__ import annotations

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import no_such_dim
from ..common.dims import Shape, axis
from .order_launch import first, no_first, no_places, placed
from .radix_sort import no_sort, sorted_along

Pair = tuple[Array, Array]


def _ranked(xp: Namespace, input: Array, dim: int, descending: bool) -> Array:
    """The indices along `dim` that put the values in order; equal ones stay in theirs."""
    if not descending:
        return xp.argsort(input, axis=dim, kind="stable")
    backwards = xp.argsort(xp.flip(input, dim), axis=dim, kind="stable")
    return xp.flip(input.shape[dim] - 1 - backwards, dim)


def _taken(xp: Namespace, input: Array, index: Array, dim: int) -> tuple[Pair, Array]:
    """The values at `index` along dim with their indices, and the indices once more for the gradient."""
    index = index.astype("int64", copy=False)
    return (xp.take_along_axis(input, index, axis=dim), index), index


@primitive(torch="sort", multiple=True, aux=("index",), accepts_integers=True)
def sort(
    xp: Namespace, input: Array, dim: int = -1, descending: bool = False, *, stable: bool = False
) -> tuple[Pair, Array]:
    """The values along dim in rising, or falling, order, and the index each had; equal ones stay in their order

    Args:
        xp: the array namespace.
        input: any shape.
        dim: the dim along which is sorted.
        descending: whether the largest comes first.
        stable: without effect: the order is always stable.

    Returns:
        The values and the indices, int64, in the shape of `input`; and the indices again.
    """
    dim = axis(dim, input.ndim, "sort")
    if not input.ndim:
        at = xp.zeros((), "int64")
        return (input.copy(), at), at
    return _taken(xp, input, _ranked(xp, input, dim, descending), dim)


@primitive(torch="topk", multiple=True, aux=("index",), accepts_integers=True)
def topk(
    xp: Namespace, input: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Pair, Array]:
    """The k largest, or smallest, values along dim, in order, and the index each has

    Args:
        xp: the array namespace.
        input: any shape.
        k: how many.
        dim: the dim along which is chosen.
        largest: whether the largest are chosen, else the smallest.
        sorted: without effect: the result is always in order.

    Returns:
        The values and the indices, int64, with k along `dim`; and the indices again.

    Raises:
        ShapeError: k is more than there are.
    """
    dim = axis(dim, input.ndim, "topk")
    n = input.shape[dim] if input.ndim else 1
    if not 0 <= k <= n:
        raise ShapeError(f"topk: expected k from 0 to {n}, the size of dim {dim}, got {k}")
    if not input.ndim:
        at = xp.zeros((), "int64")
        return (input.copy(), at), at
    begin: tuple[slice, ...] = (slice(None),) * dim + (slice(None, k),)
    return _taken(xp, input, _ranked(xp, input, dim, largest)[begin], dim)


for _op in (sort, topk):

    @_op.vjp("input")
    def _(xp: Namespace, g: Pair, input_shape: Shape, index: Array, dim: int) -> Array:
        if not input_shape:
            return g[0]
        made = xp.zeros(input_shape, g[0].dtype)
        where = [
            xp.arange(n).reshape([-1 if i == d else 1 for i in range(index.ndim)]) for d, n in enumerate(index.shape)
        ]
        where[dim] = index
        made[tuple(where)] = g[0]  # every index at most once
        return made

    @_op.cuda_vjp("placed", "input", when=no_places)
    def _(launcher: Launcher, g: Pair, input_shape: Shape, index: Array, dim: int) -> Array:
        return placed(launcher, g[0], index, dim, input_shape)


@topk.cuda("first", when=no_first)
def _(launcher: Launcher, input: Array, k: int, largest: bool) -> tuple[Pair, Array]:
    values, index = first(launcher, input, k, largest)
    return (values, index), index


def _no_sorted_first(input: Array, k: int, dim: int) -> str:
    """Why topk cannot take the first `k` of what the kernels sort; "" if it can."""
    return no_sort(input, dim) or ("" if 0 < k <= input.shape[dim] else "none, or too many")


@topk.cuda("sorted", when=_no_sorted_first)
def _(launcher: Launcher, input: Array, k: int, dim: int, largest: bool) -> tuple[Pair, Array]:
    begin: tuple[slice, ...] = (slice(None),) * (dim % input.ndim) + (slice(None, k),)
    values, index = (launcher.contiguous(a[begin]) for a in sorted_along(launcher, input, dim, largest))
    return (values, index), index


@sort.cuda("radix", when=no_sort)
def _(launcher: Launcher, input: Array, dim: int, descending: bool) -> tuple[Pair, Array]:
    values, index = sorted_along(launcher, input, dim, descending)
    return (values, index), index


sort.samples(sample((3, 5)), sample((2, 4, 3), 1, True), sample((), 0), sample((0, 2)), sample((2, 0)))
sort.perf_samples(sample((3, 700), -1), sample((3, 70, 40), 1, True), sample((2, 20_001)), sample((9001, 3), 0, True))
sort.errors(no_such_dim())
topk.samples(sample((3, 5), 2), sample((2, 4, 3), 3, 1, False), sample((), 1), sample((2, 3), 0), sample((0, 4), 2))
topk.perf_samples(sample((7, 20_001), 20), sample((70, 640), 5, -1, False), sample((3, 70, 40), 7, 1))
topk.errors(
    ErrorSample(sample((2, 3), 4), ShapeError, "topk: expected k from 0 to 3, the size of dim 1, got 4"),
    ErrorSample(sample((2, 3), 1, 2), ShapeError, "dim 2 is outside a tensor of 2 dims"),
)
