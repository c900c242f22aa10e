"""Running sums."""

from __future__ import annotations

import math

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, float64
from ...namespace import Namespace, is_numpy
from ...op import primitive, sample
from ...op_samples import no_such_dim
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import axis

_HEADER, _THREADS = "ops/reduction/cumsum.cuh", 256
_SHORT = 1024  # places of a row that has a warp
_ROW, _LINE = 8192, 64  # the fewest places of a row, and of lines side by side, that are worth a stretch of their own


@primitive(torch="cumsum", accepts_integers=True)
def cumsum(xp: Namespace, input: Array, dim: int) -> Array:
    """The sums of the first, the first two, the first three, ... along dim"""
    along = axis(dim, input.ndim, "cumsum")
    return _running(xp, xp.atleast_1d(input), along).reshape(input.shape)


def _running(xp: Namespace, x: Array, dim: int) -> Array:
    """Running sums along dim. For NumPy's, which add one by one, fp32 is summed in fp64, or errors would accumulate."""
    if is_numpy(xp) and x.dtype == float32:
        return xp.cumsum(x, axis=dim, dtype=float64).astype(float32)
    return xp.cumsum(x, axis=dim)


@cumsum.vjp("input")
def _(xp: Namespace, g: Array, dim: int) -> Array:
    if not g.ndim:
        return g
    return xp.flip(_running(xp, xp.flip(g, dim), dim), dim)


def _no_kernel(input: Array, dim: int) -> str:
    """Why the kernels cannot take an input; "" if they can."""
    if not input.size or isinstance(dim, bool) or not -input.ndim <= dim < input.ndim:
        return "nothing to sum, or arguments that are refused"
    return same(AT_MOST_FP32, input)


def _running_on_gpu(k: Launcher, x: Array, dim: int, back: bool) -> Array:
    """Running sums along `dim`, from its first place or from its last `back`."""
    x, d = k.contiguous(x), dim % x.ndim
    outer, n, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
    width = 1 if x.data.ptr % 16 else math.gcd(n if inner == 1 else inner, 16 // x.itemsize)
    y = k.empty(x.shape, x.dtype)
    names = {"T": x.dtype, "BACK": int(back), "WIDTH": width, "THREADS": 32 if n <= _SHORT else _THREADS}
    if inner == 1:
        stretch = _stretch(n, _ROW, -(-2 * k.multiprocessors // outer))
        rows = _THREADS // names["THREADS"]
        count, of = -(-n // stretch), (np.int64(n), np.int64(stretch))
        totals = k.empty((outer, count), float32) if count > 1 else np.int64(0)
        if count > 1:
            k.launch_header(_HEADER, "row_totals", names, (outer, count), _THREADS, (x, totals, *of))
        args, grid = (x, totals, y, np.int64(outer), *of), (-(-outer // rows), count)
        k.launch_header(_HEADER, "running_rows", names, grid, _THREADS, args)
        return y
    lines = outer * inner // width
    stretch = _stretch(n, _LINE, -(-1024 * k.multiprocessors // lines))
    count = -(-n // stretch)
    numbers = (*map(np.int64, (lines * count, n, stretch)), *map(np.int32, (count, inner)))
    blocks = (-(-lines * count // _THREADS),)
    totals = k.empty((outer, count, inner), float32) if count > 1 else np.int64(0)
    if count > 1:
        k.launch_header(_HEADER, "line_totals", names, blocks, _THREADS, (x, totals, *numbers))
    k.launch_header(_HEADER, "running_lines", names, blocks, _THREADS, (x, totals, y, *numbers))
    return y


def _stretch(n: int, least: int, wanted: int) -> int:
    """Places to a stretch where `wanted` of them fill the GPU: a multiple of eight, none shorter than `least`."""
    return max(-(-n // wanted) + 7 & -8, least)


@cumsum.cuda("running", when=_no_kernel)
def _(k: Launcher, input: Array, dim: int) -> Array:
    return _running_on_gpu(k, input, dim, False)


@cumsum.cuda_vjp("running", "input", when=_no_kernel)
def _(k: Launcher, g: Array, dim: int) -> Array:
    return _running_on_gpu(k, g, dim, True)


cumsum.errors(no_such_dim())
cumsum.perf_samples(
    sample((3, 70, 640), -1),
    sample((3, 700, 40), 1),
    sample((70, 641), 0),
    sample((5, 20_001), -1),
    sample((2, 33_000), -1),
    sample((77, 2048), -1),
)


cumsum.samples(sample((3, 4), 0), sample((2, 3, 4), -2), sample((0, 3), 1), sample((), 0))
