"""Values in order along a dim: `sort` and `topk`, and the kernels that sort."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, bfloat16, float16, float32, int32, int64
from ..namespace import Namespace
from ..op import ErrorSample, primitive, sample
from ..op_samples import no_such_dim
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import Shape, axis

_RADIX_HEADER = "library/radix_sort.cuh"

_DIGITS, _BLOCK, _SCANNING, _ITEMS = 256, 256, 1024, 16  # as in that header; the most values of a thread

_TILE = _BLOCK * _ITEMS

_INFINITY = {float32: 0x7F800000, bfloat16: 0x7F80, float16: 0x7C00}


def no_sort(input: Array, dim: int) -> str:
    """Says why the kernels cannot put `input` in order along `dim`; "" if they can."""
    if not input.size or not input.ndim or isinstance(dim, bool) or not -input.ndim <= dim < input.ndim:
        return "nothing to order, or arguments that are refused"
    n = input.shape[dim]
    if n >= 2**31 - 2**16 or input.size // n * -(-n // _TILE) >= 2**31:
        return "places beyond 32 bits"
    return same(AT_MOST_FP32, input)


def sorted_along(launcher: Launcher, x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """Returns the values of `x` along `dim` in rising, or falling, order, and their places, int64.

    Equal values stay in their order.
    """
    dims = [d for d in range(x.ndim) if d != dim % x.ndim]
    to_last = [*dims, dim % x.ndim]
    values, index = _sorted_rows(launcher, launcher.contiguous(x.transpose(to_last)), descending)
    back = [to_last.index(d) for d in range(x.ndim)]
    return launcher.contiguous(values.transpose(back)), launcher.contiguous(index.transpose(back))


def _sorted_rows(launcher: Launcher, x: Array, descending: bool) -> tuple[Array, Array]:
    """As `sorted_along`, along the last dim of dense `x`.

    A pass orders by eight bits. Passes write to memory of their own and to the results' in turns, to these the last.
    """
    n = x.shape[-1]
    rows, tiles = x.size // n, -(-n // _TILE)
    values, index = launcher.empty(x.shape, x.dtype), launcher.empty(x.shape, int64)
    items = _ITEMS if tiles > 1 else 1 << (-(-n // _BLOCK) - 1).bit_length()
    names = {"T": x.dtype, "ITEMS": items, "DESCENDING": int(descending), "INFINITY_BITS": _INFINITY[x.dtype]}
    if tiles == 1:
        launcher.launch_header(
            _RADIX_HEADER, "sort_short_rows", names, (rows,), _BLOCK, (x, values, index, np.int32(n))
        )
        return values, index
    other, places = launcher.empty(x.shape, x.dtype), launcher.empty(x.shape, int32)
    counts = launcher.empty((rows, tiles, _DIGITS), int32)
    null, of_row = np.int64(0), np.int32(tiles)
    read: tuple[Array, Array] = (x, null)
    for i in range(x.itemsize):
        sizes = (np.int32(n), of_row, np.int32(8 * i))
        written = (values, index.view(int32)) if i % 2 else (other, places)
        ends = (null, index) if i == x.itemsize - 1 else (written[1], null)
        launcher.launch_header(_RADIX_HEADER, "count_digits", names, (rows * tiles,), _BLOCK, (read[0], counts, *sizes))
        launcher.launch_header(_RADIX_HEADER, "place_digits", names, (rows,), _SCANNING, (counts, of_row))
        args = (*read, written[0], *ends, counts, *sizes)
        launcher.launch_header(_RADIX_HEADER, "move_by_digits", names, (rows * tiles,), _BLOCK, args)
        read = written
    return values, index


_PLACES_HEADER, _HELD = "library/order.cuh", 4096  # as in that header


def _threads(n: int) -> int:
    return 256 if n <= 8192 else 1024


def no_first(input: Array, k: int, dim: int) -> str:
    """Says why the kernel cannot find the first `k` of `input` along `dim`; "" if it can."""
    if not input.size or not input.ndim or isinstance(dim, bool) or dim not in (-1, input.ndim - 1):
        return "nothing to order, or another dim than the last"
    n = input.shape[-1]
    if not 0 < k <= min(n, _threads(n)) or n >= 2**31 - 2**16:
        return "none, or too many"
    width = math.gcd(n, 16 // input.itemsize)
    if k * width * -(-n // (width * _threads(n))) > _HELD:
        return f"{k} of {n} may take more shared memory than there is"
    return same(AT_MOST_FP32, input)


def first(launcher: Launcher, x: Array, k: int, largest: bool) -> tuple[Array, Array]:
    """Returns the `k` largest, or smallest, of each row of `x` in order, and their places, int64."""
    x, n = launcher.contiguous(x), x.shape[-1]
    values, index = (launcher.empty((*x.shape[:-1], k), d) for d in (x.dtype, int64))
    width = math.gcd(n, 16 // x.itemsize)
    names = _names(x) | {"WIDTH": width, "THREADS": _threads(n), "LARGEST": int(largest)}
    args = (x, values, index, np.int32(n), np.int32(k))
    launcher.launch_header(_PLACES_HEADER, "topk", names, (x.size // n,), _threads(n), args)
    return values, index


def no_places(input: Array, dim: int) -> str:
    """Says why the kernel cannot put gradients back along `dim` of `input`; "" if it can."""
    if not input.size or not input.ndim or not -input.ndim <= dim < input.ndim or max(input.shape) >= 2**31:
        return "nothing to put, or arguments that are refused"
    return same(AT_MOST_FP32, input)


def placed(launcher: Launcher, g: Array, index: Array, dim: int, shape: Shape) -> Array:
    """Zeros of `shape` with `g` scattered to `index` along `dim`; indices are unique."""
    d, g, index = dim % len(shape), launcher.contiguous(g), launcher.contiguous(index)
    out = launcher.empty(shape, g.dtype) if g.shape == shape else launcher.xp.zeros(shape, g.dtype)
    if g.size:
        sizes = (np.int32(shape[d]), np.int32(g.shape[d]), np.int32(math.prod(shape[d + 1 :])))
        args = (g, index, out, np.int64(g.size), *sizes)
        launcher.launch_header(_PLACES_HEADER, "placed", _names(g), (-(-g.size // 256),), 256, args)
    return out


def _names(x: Array) -> dict[str, Any]:
    """Returns the header's constants, for kernels that do not use them."""
    return {"T": x.dtype, "WIDTH": 1, "THREADS": 32, "LARGEST": 1}


Pair = tuple[Array, Array]


def _ranked(xp: Namespace, input: Array, dim: int, descending: bool) -> Array:
    """Returns the indices along `dim` that put the values in order; equal ones stay in theirs."""
    if not descending:
        return xp.argsort(input, axis=dim, kind="stable")
    backwards = xp.argsort(xp.flip(input, dim), axis=dim, kind="stable")
    return xp.flip(input.shape[dim] - 1 - backwards, dim)


def _taken(xp: Namespace, input: Array, index: Array, dim: int) -> tuple[Pair, Array]:
    """Returns the values at `index` along dim with their indices, and the indices once more for the gradient."""
    index = index.astype("int64", copy=False)
    return (xp.take_along_axis(input, index, axis=dim), index), index


@primitive(torch="sort", multiple=True, aux=("index",), accepts_integers=True)
def sort(
    xp: Namespace, input: Array, dim: int = -1, descending: bool = False, *, stable: bool = False
) -> tuple[Pair, Array]:
    """The values along dim in rising, or falling, order, and the index each had; equal ones stay in their order

    Args:
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
    """Says why topk cannot take the first `k` of what the kernels sort; "" if it can."""
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
