"""The largest and smallest values along dims and their places, and the kernels that find them."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..autograd.grad_target import GradTargets
from ..backend.cuda.codegen.column_codegen import column_tiling
from ..backend.cuda.codegen.kernel_ir import Operands, Program, Reduction
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, float32, int32, int64
from ..namespace import Namespace
from ..op import ErrorSample, Op, composite, primitive, sample
from ..op_samples import no_such_dim
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import Dims, Shape, axes, axis, spread
from ..ops.common.elementwise_codegen import broadcast_grad
from ..ops.common.row_kernels import reduce, reduced_rows, row_program
from ..ops.reduction.reduce import neighbours, reducing
from ..tensors.tensor import Tensor
from .pointwise import maximum, minimum

_HEADER, _THREADS = "library/extreme.cuh", 256

_LEAST = 2 * _THREADS  # packets of a row that are worth a block of their own


def no_extreme(input: Array, dim: int | None) -> str:
    """Says why the kernels cannot take `input` along `dim`, None being all of it; "" if they can."""
    if not input.size or not input.ndim or isinstance(dim, bool):
        return "no values, a single one, or arguments that are refused"
    if dim is not None and not -input.ndim <= dim < input.ndim:
        return "arguments that are refused"
    if (input.size if dim is None else input.shape[dim]) >= 2**31 - 2**16:
        return "places beyond 32 bits"
    return same(AT_MOST_FP32, input)


def extremes(k: Launcher, x: Array, dim: int | None, *, largest: bool, values: bool) -> tuple[Array | None, Array]:
    """The largest, or smallest, values of `x` along `dim` where `values` are wanted, and their first places, int64.

    Both have x's shape with `dim` of size 1; without `dim` all of x is one row.
    """
    x, d = k.contiguous(x), 0 if dim is None else dim % x.ndim
    kept = tuple(1 if dim is None or i == d else n for i, n in enumerate(x.shape))
    outer, n, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
    if dim is None:
        n, inner = x.size, 1
    width = 1 if x.data.ptr % 16 else math.gcd(n if inner == 1 else inner, 16 // x.itemsize)
    index, found = k.empty(kept, int64), k.empty(kept, x.dtype) if values else None
    names = {"T": x.dtype, "WIDTH": width, "LARGEST": int(largest), "THREADS": 32, "ACROSS": 32, "LANES": 1}
    made = (x, index, np.int64(0) if found is None else found)
    if inner == 1:
        packets = n // width
        threads = _THREADS if packets > _THREADS else builtins.min(32, 1 << (packets - 1).bit_length())
        wanted = -(-2 * k.multiprocessors // outer) if threads == _THREADS else 1
        stretch = builtins.max(-(-packets // wanted), _LEAST) * width
        count, rows = -(-n // stretch), _THREADS // threads
        args = (*made, *_left(k, outer * count, count), np.int64(outer), np.int32(n), np.int32(stretch))
        grid = (-(-outer // rows), count)
        k.launch_header(_HEADER, "extreme_of_rows", names | {"THREADS": threads}, grid, _THREADS, args)
        return found, index
    tiling = column_tiling(inner, n, width, x.itemsize)
    tiles = tiling.tiles(inner)
    stretch = tiling.stretch(n, tiles * outer, k.multiprocessors)
    count = -(-n // stretch)
    left = _left(k, outer * tiles * count * tiling.columns, count)
    names |= {"ACROSS": tiling.across, "LANES": tiling.lanes}
    args = (*made, *left, *map(np.int32, (n, stretch, inner)))
    k.launch_header(_HEADER, "extreme_of_columns", names, (outer, count, tiles), tiling.threads, args)
    return found, index


def _left(k: Launcher, size: int, count: int) -> tuple[Array, Array, Array]:
    """Memory for what `count` blocks that share a row leave, values and places, and counters of those that finished."""
    if count == 1:
        return np.int64(0), np.int64(0), k.columns.counters
    return k.empty((size,), float32), k.empty((size,), int32), k.columns.counters


Pair = tuple[Array, Array]

_REFUSED = [
    no_such_dim(),
    ErrorSample(sample((), 1), ShapeError, "dim 1 is outside a tensor of 0 dims"),
    ErrorSample(sample((2, 0), 1), ShapeError, r"at least one value over dims \(1,\) of \(2, 0\)"),
]


@primitive(torch="amax", accepts_integers=True)
def amax(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The largest value over dim; ties share the gradient evenly"""
    return xp.max(input, axis=_some(input, dim, "amax"), keepdims=keepdim)


@primitive(torch="amin", accepts_integers=True)
def amin(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The smallest value over dim; ties share the gradient evenly"""
    return xp.min(input, axis=_some(input, dim, "amin"), keepdims=keepdim)


def _some(input: Array, dim: Dims, op: str) -> tuple[int, ...]:
    """Returns the dims that `dim` names. Raises ShapeError if one has size 0: nothing has no largest value."""
    dims = axes(dim, input.ndim, op)
    if any(input.shape[d] == 0 for d in dims):
        raise ShapeError(f"{op}: expected at least one value over dims {dims} of {tuple(input.shape)}")
    return dims


for _op in (amax, amin):
    _op.errors(*_REFUSED)

    @_op.vjp("input")
    def _(xp: Namespace, g: Array, input: Array, out: Array, dim: Dims, keepdim: bool) -> Array:
        dims = axes(dim, input.ndim, "amax")
        here = (input == spread(xp, out, input.shape, dims, keepdim)) | (input != input)  # NaN is the largest there is
        share = spread(xp, g, input.shape, dims, keepdim) / xp.sum(here, axis=dims, keepdims=True)
        return xp.where(here, share, 0.0)

    _op.samples(
        sample((2, 3, 4)),
        sample((2, 3, 4), 1),
        sample((2, 3, 4), (0, 2), keepdim=True),
        sample((2, 3, 4), -1, keepdim=True),
        sample((), 0),
    )

reducing(amax, Reduction("max", "input"))

reducing(amin, Reduction("min", "input"))

for _op in (amax, amin):

    @_op.cuda_vjp("reduction", "input", when=neighbours)
    def _(k: Launcher, g: Array, input: Array, out: Array, dim: Dims, keepdim: bool) -> Array:
        dims, here = axes(dim, input.ndim, "amax"), "input == out || input != input"
        if (rows := reduced_rows(k, input, dims)) is not None:
            program = Program((f"sum ties = {here}",), (f"{here} ? g / ties : 0.f",))
            operands = Operands(
                {"input": rows}, {}, {"g": k.contiguous(g).reshape(-1), "out": k.contiguous(out).reshape(-1)}
            )
            return row_program(k, program, operands, input.dtype, input.shape, 1)
        kept = [1 if i in dims else n for i, n in enumerate(input.shape)]
        g, out = g.reshape(kept), out.reshape(kept)
        ties = reduce(k, Reduction("sum", here), {"input": input}, dims, float32, each={"out": out})
        each = {"input": input, "g": g, "out": out, "ties": ties}
        return k.elementwise((f"{here} ? g / ties : 0.f",), each, (input.dtype,))[0]

    _op.perf_samples(sample((3, 70, 640), -1), sample((3, 700, 40), 1, keepdim=True), sample((77, 2048)))


def _positions(xp: Namespace, input: Array, dim: int | None, keepdim: bool, find: Any) -> Array:
    """Returns the indices that `find` (argmax or argmin) gives along dim, or in the flattened input."""
    _some(input, dim, "argmax")
    if dim is None or not input.ndim:
        flat = find(input.reshape(-1))
        return flat.reshape([1] * input.ndim) if keepdim else flat
    found = find(input, axis=axis(dim, input.ndim, "argmax"))
    return xp.expand_dims(found, dim) if keepdim else found


@primitive(torch="argmax")
def argmax(xp: Namespace, input: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The index of the largest value along dim; without dim, in the flattened input"""
    return _positions(xp, input, dim, keepdim, xp.argmax)


@primitive(torch="argmin")
def argmin(xp: Namespace, input: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The index of the smallest value along dim; without dim, in the flattened input"""
    return _positions(xp, input, dim, keepdim, xp.argmin)


for _op in (argmax, argmin):
    _op.non_differentiable("input")
    _op.errors(*_REFUSED)

    _op.samples(sample((2, 3, 4)), sample((2, 3, 4), 1), sample((2, 3, 4), -1, keepdim=True), sample((), 0))
    _op.perf_samples(sample((3, 70, 640), -1), sample((3, 700, 40), 1, keepdim=True), sample((77, 2048)))


def _placing(op: Op, largest: bool) -> None:
    """Declares the kernel of argmax, or of argmin, which finds the smallest."""

    @op.cuda("extremes", when=no_extreme)
    def _(k: Launcher, input: Array, dim: int | None, keepdim: bool) -> Array:
        _, at = extremes(k, input, dim, largest=largest, values=False)
        return at if keepdim else at.reshape(()) if dim is None else k.xp.squeeze(at, dim)


_placing(argmax, largest=True)

_placing(argmin, largest=False)


def _along(xp: Namespace, input: Array, dim: int, keepdim: bool, find: Any) -> tuple[Pair, Array]:
    """Values and indices along dim, and the indices once more for the gradient."""
    _some(input, dim, "max")
    if not input.ndim:
        at = xp.zeros((), "int64")
        return (input.copy(), at), at
    at = _positions(xp, input, dim, True, find)
    values = xp.take_along_axis(input, at, axis=dim)
    index = at if keepdim else xp.squeeze(at, dim)
    return (values if keepdim else xp.squeeze(values, dim), index), index


@primitive(multiple=True, aux=("index",), accepts_integers=True)
def max_dim(xp: Namespace, input: Array, dim: int, keepdim: bool = False) -> tuple[Pair, Array]:
    """The largest value along dim and its index: max(input, dim)"""
    return _along(xp, input, dim, keepdim, xp.argmax)


@primitive(multiple=True, aux=("index",), accepts_integers=True)
def min_dim(xp: Namespace, input: Array, dim: int, keepdim: bool = False) -> tuple[Pair, Array]:
    """The smallest value along dim and its index: min(input, dim)"""
    return _along(xp, input, dim, keepdim, xp.argmin)


for _op in (max_dim, min_dim):
    _op.errors(*_REFUSED)

    @_op.vjp("input")
    def _(xp: Namespace, g: Pair, input_shape: Shape, index: Array, dim: int, keepdim: bool) -> Array:
        if not input_shape:
            return g[0]
        at = index if keepdim else xp.expand_dims(index, dim)
        along = [1] * len(input_shape)
        along[dim] = -1
        here = xp.arange(input_shape[dim]).reshape(along) == at
        return xp.where(here, g[0] if keepdim else xp.expand_dims(g[0], dim), 0.0)

    _op.samples(sample((2, 3, 4), 1), sample((3, 4), -1, keepdim=True), sample((), 0))
    _op.perf_samples(sample((3, 70, 640), -1), sample((3, 700, 40), 1, keepdim=True), sample((5, 20_001), 1))


def _few_places(input: Array, dim: int) -> str:
    return "" if input.shape[dim] <= 1 << 24 else "places that fp32 cannot tell apart"


def _finding(op: Op, largest: bool) -> None:
    """Declares the kernels of max_dim, or of min_dim, which finds the smallest."""

    @op.cuda("extremes", when=no_extreme)
    def _(k: Launcher, input: Array, dim: int, keepdim: bool) -> tuple[Pair, Array]:
        found, at = extremes(k, input, dim, largest=largest, values=True)
        values, index = (a if keepdim else k.xp.squeeze(a, dim) for a in (found, at))
        return (values, index), index

    @op.cuda_vjp("extremes", "input", when=(no_extreme, _few_places))
    def _(
        k: Launcher, g: Pair, input_shape: Shape, index: Array, dim: int, keepdim: bool, targets: GradTargets
    ) -> Array:
        d = dim % len(input_shape)
        values, at = (spread(k.xp, a, input_shape, (d,), keepdim) for a in (g[0], index))
        place = k.xp.arange(input_shape[d], dtype=float32).reshape(-1, *[1] * (len(input_shape) - 1 - d))
        operands = {"g": values, "at": at, "place": place}
        return broadcast_grad(k, "place == at ? g : 0.f", operands, input_shape, targets["input"])


_finding(max_dim, largest=True)

_finding(min_dim, largest=False)


@composite(torch="max")
def max(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The largest value of all; with dim, (values, indices) along it; with a tensor in its place, that of each pair"""
    if isinstance(dim, Tensor):
        return maximum(input, dim)
    return amax(input) if dim is None else max_dim(input, dim, keepdim)


@composite(torch="min")
def min(input: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """The smallest value of all; with dim, (values, indices) along it; with a tensor in its place, that of each pair"""
    if isinstance(dim, Tensor):
        return minimum(input, dim)
    return amin(input) if dim is None else min_dim(input, dim, keepdim)


for _op in (max, min):
    _op.errors(*_REFUSED)

    _op.samples(sample((3, 4)), sample((2, 3, 4), 1), sample((3, 4), 0, True))
