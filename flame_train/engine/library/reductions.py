"""Products, norms, running sums, and whether any or all hold."""

from __future__ import annotations

import math

import numpy as np

from ...errors import ShapeError
from ..backend.cuda.codegen.kernel_ir import Reduction
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, bool_, float32, float64, int32, int64
from ..namespace import Namespace, is_numpy
from ..op import ErrorSample, Op, primitive, sample
from ..op_samples import Values, apart, booleans, integers, no_such_dim
from ..ops.common.conditions import AT_MOST_FP32, GENERATED, same
from ..ops.common.dims import Dims, axes, axis, spread
from ..ops.common.row_kernels import extent, reduce
from ..ops.reduction.reduce import count_along, neighbours, reduced_dims, reducing, with_dims
from ..sums import accurate_sum

_THREADS, _HELD = 256, 32  # threads to a block; elements that a thread holds


@primitive(torch="prod", accepts_integers=True)
def prod(xp: Namespace, input: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The product over dim, which is one dim or all; exact gradients where factors are zero"""
    return xp.prod(input, axis=axes(dim, input.ndim, "prod"), keepdims=keepdim)


@prod.vjp("input")
def _(xp: Namespace, g: Array, input: Array, dim: int | None, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "prod")
    if not input.size:
        return xp.zeros_like(input)
    rows = input.reshape(1, -1) if dim is None else xp.moveaxis(input, dim, -1) if input.ndim else input.reshape(1, 1)
    one = xp.ones((*rows.shape[:-1], 1), rows.dtype)
    before = xp.cumprod(xp.concatenate([one, rows[..., :-1]], axis=-1), axis=-1)
    after = xp.flip(xp.cumprod(xp.concatenate([one, xp.flip(rows, -1)[..., :-1]], axis=-1), axis=-1), -1)
    others = before * after
    others = others.reshape(input.shape) if dim is None or not input.ndim else xp.moveaxis(others, -1, dim)
    return spread(xp, g, input.shape, dims, keepdim) * others


reducing(prod, Reduction("prod", "input"))


def _no_gradient(input: Array, dim: int | None) -> str:
    """Says why the kernel of the gradient cannot take `input`; "" if it can."""
    if not input.size or not input.ndim or dim not in (None, -1, input.ndim - 1):
        return "no elements, a single one, or another dim than the last"
    if (input.size if dim is None else input.shape[-1]) > _THREADS * _HELD:
        return f"rows of more than {_THREADS * _HELD}"
    return same(AT_MOST_FP32, input)


@prod.cuda_vjp("others", "input", when=_no_gradient)
def _(k: Launcher, g: Array, input: Array, dim: int | None) -> Array:
    x, n = k.contiguous(input), input.size if dim is None else input.shape[-1]
    dx, rows = k.empty(x.shape, x.dtype), x.size // n
    width = 1 if x.data.ptr % 16 else math.gcd(n, 16 // x.itemsize)
    threads = 32 if -(-n // (32 * width)) * width <= _HELD else _THREADS
    names = {"T": x.dtype, "WIDTH": width, "THREADS": threads, "PACKETS": -(-n // (threads * width))}
    grid, args = (-(-rows * threads // _THREADS),), (x, k.contiguous(g), dx, np.int64(rows), np.int32(n))
    k.launch_header("library/prod.cuh", "product_gradient", names, grid, _THREADS, args)
    return dx


prod.errors(no_such_dim())

prod.perf_samples(
    sample(Values((3, 70, 640), 0.9, 1.1), -1),
    sample(Values((3, 700, 40), 0.9, 1.1), 1, keepdim=True),
    sample(Values((60, 9001), 0.99, 1.01), -1),
)

prod.samples(sample((2, 3)), sample((2, 3, 4), 1), sample((2, 3, 4), -1, keepdim=True), sample((), 0))

_HEADER, _SCAN_THREADS = "library/cumsum.cuh", 256

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


def _no_scan_kernel(input: Array, dim: int) -> str:
    """Says why the kernels cannot take an input; "" if they can."""
    if not input.size or isinstance(dim, bool) or not -input.ndim <= dim < input.ndim:
        return "nothing to sum, or arguments that are refused"
    return same(AT_MOST_FP32, input)


def _running_on_gpu(k: Launcher, x: Array, dim: int, back: bool) -> Array:
    """Running sums along `dim`, from its first place or from its last `back`."""
    x, d = k.contiguous(x), dim % x.ndim
    outer, n, inner = math.prod(x.shape[:d]), x.shape[d], math.prod(x.shape[d + 1 :])
    width = 1 if x.data.ptr % 16 else math.gcd(n if inner == 1 else inner, 16 // x.itemsize)
    y = k.empty(x.shape, x.dtype)
    names = {"T": x.dtype, "BACK": int(back), "WIDTH": width, "THREADS": 32 if n <= _SHORT else _SCAN_THREADS}
    if inner == 1:
        stretch = _stretch(n, _ROW, -(-2 * k.multiprocessors // outer))
        rows = _SCAN_THREADS // names["THREADS"]
        count, of = -(-n // stretch), (np.int64(n), np.int64(stretch))
        totals = k.empty((outer, count), float32) if count > 1 else np.int64(0)
        if count > 1:
            k.launch_header(_HEADER, "row_totals", names, (outer, count), _SCAN_THREADS, (x, totals, *of))
        args, grid = (x, totals, y, np.int64(outer), *of), (-(-outer // rows), count)
        k.launch_header(_HEADER, "running_rows", names, grid, _SCAN_THREADS, args)
        return y
    lines = outer * inner // width
    stretch = _stretch(n, _LINE, -(-1024 * k.multiprocessors // lines))
    count = -(-n // stretch)
    numbers = (*map(np.int64, (lines * count, n, stretch)), *map(np.int32, (count, inner)))
    blocks = (-(-lines * count // _SCAN_THREADS),)
    totals = k.empty((outer, count, inner), float32) if count > 1 else np.int64(0)
    if count > 1:
        k.launch_header(_HEADER, "line_totals", names, blocks, _SCAN_THREADS, (x, totals, *numbers))
    k.launch_header(_HEADER, "running_lines", names, blocks, _SCAN_THREADS, (x, totals, y, *numbers))
    return y


def _stretch(n: int, least: int, wanted: int) -> int:
    """Places to a stretch where `wanted` of them fill the GPU: a multiple of eight, none shorter than `least`."""
    return max(-(-n // wanted) + 7 & -8, least)


@cumsum.cuda("running", when=_no_scan_kernel)
def _(k: Launcher, input: Array, dim: int) -> Array:
    return _running_on_gpu(k, input, dim, False)


@cumsum.cuda_vjp("running", "input", when=_no_scan_kernel)
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


@primitive(torch="any", accepts_integers=True)
def any(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True where at least one element over dim is not zero; False over none"""
    return xp.any(input != 0, axis=axes(dim, input.ndim, "any"), keepdims=keepdim)


@primitive(torch="all", accepts_integers=True)
def all(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True where no element over dim is zero; True over none"""
    return xp.all(input != 0, axis=axes(dim, input.ndim, "all"), keepdims=keepdim)


for _op in (any, all):
    _op.non_differentiable("input")
    _op.samples(
        sample(booleans(3, 4)),
        sample(integers(2, 2, 3, 4), 1),
        sample(booleans(2, 3, 4), (0, 2), keepdim=True),
        sample((0, 3), 0),
        sample((3, 2)),
    )
    _op.perf_samples(
        sample(booleans(4, 70, 640)),
        sample(booleans(20_003)),
        sample(booleans(3, 700, 40), 1),
        sample(integers(2, 300, 640), -1, keepdim=True),
    )
    _op.errors(no_such_dim())


def _no_truth_kernel(input: Array, dim: Dims) -> str:
    """Says why the reduction kernels cannot take `input` over `dim`; "" if they can."""
    if not input.size or not input.ndim:
        return "no elements, or a single one"
    if input.dtype not in GENERATED | {int32, int64}:
        return f"no kernel for {input.dtype.name}"
    try:
        return "" if extent(input.shape, axes(dim, input.ndim, "truth")) else "the dims are not neighbours"
    except ShapeError:
        return "arguments that are refused"


def _reducing(op: Op, how: str) -> None:
    """Declares the kernel of an op that is the largest, or smallest, of the truth values."""

    @op.cuda("reduction", when=_no_truth_kernel)
    def _(k: Launcher, input: Array, dim: Dims, keepdim: bool) -> Array:
        dims = axes(dim, input.ndim, "truth")
        found = reduce(k, Reduction(how, "input != 0.f ? 1.f : 0.f"), {"input": input}, dims, bool_)
        return found if keepdim else found.reshape([n for i, n in enumerate(found.shape) if i not in dims])


_reducing(any, "max")

_reducing(all, "min")


@primitive(torch="norm")
def norm(xp: Namespace, input: Array, p: float | str | None = "fro", dim: Dims = None, keepdim: bool = False) -> Array:
    """(sum |input|^p)^(1/p) over dim; "fro" is p = 2, inf the largest, -inf the smallest, 0 how many are not zero

    Args:
        input: the input.
        p: the order.
        dim: the dim or dims; None: all.
        keepdim: keeps reduced dims, with size 1.

    Returns:
        The norm.

    Raises:
        ShapeError: no values for an infinite p.
        ValueError: a p that is no order.
    """
    p, dims, size = _order(p), axes(dim, input.ndim, "norm"), xp.abs(input)
    if p == 2.0:
        return xp.sqrt(accurate_sum(xp.sum, input * input, dims, keepdim))
    if math.isinf(p):
        if not count_along(input.shape, dims):
            raise ShapeError(f"norm: expected at least one value over dims {dims} of {tuple(input.shape)} for p = {p}")
        return (xp.max if p > 0 else xp.min)(size, axis=dims, keepdims=keepdim)
    if p == 0.0:
        return xp.sum(input != 0, axis=dims, keepdims=keepdim).astype(input.dtype)
    return accurate_sum(xp.sum, size**p, dims, keepdim) ** (1.0 / p)


def _order(p: float | str | None) -> float:
    if p is None or p == "fro":
        return 2.0
    if isinstance(p, str):
        raise ValueError(f"norm: expected p a number or 'fro', got {p!r}")
    return float(p)


@norm.vjp("input")
def _(xp: Namespace, g: Array, input: Array, out: Array, p: float | str | None, dim: Dims, keepdim: bool) -> Array:
    p, dims, size = _order(p), axes(dim, input.ndim, "norm"), xp.abs(input)
    g, n = (spread(xp, a, input.shape, dims, keepdim) for a in (g, out))
    if p == 0.0:
        return xp.zeros_like(input)
    if math.isinf(p):
        here = size == n
        return xp.where(here, g * xp.sign(input) / xp.sum(here, axis=dims, keepdims=True), 0.0)
    absent = (n == 0) | (input == 0)  # there the gradient is zero by convention
    ratio = xp.where(absent, 1.0, size) / xp.where(absent, 1.0, n)
    return xp.where(absent, 0.0, g * xp.sign(input) * ratio ** (p - 1.0))


_NORMS = {
    2.0: Reduction("sum", "input * input", "sqrtf(total)"),
    1.0: Reduction("sum", "fabsf(input)"),
    math.inf: Reduction("max", "fabsf(input)"),
    -math.inf: Reduction("min", "fabsf(input)"),
}


def _norm_condition(input: Array, p: float | str | None, dim: Dims) -> str:
    if p is not None and p != "fro" and (isinstance(p, str) or float(p) not in _NORMS):
        return f"no kernel for p = {p}"
    return neighbours(input, dim)


@norm.cuda("reduction", when=_norm_condition)
def _(k: Launcher, input: Array, p: float | str | None, dim: Dims, keepdim: bool) -> Array:
    dims = reduced_dims(input, dim)
    return with_dims(reduce(k, _NORMS[_order(p)], {"input": input}, dims, input.dtype), dims, keepdim)


def _norm_gradient_condition(input: Array, p: float | str | None, dim: Dims) -> str:
    reason = _norm_condition(input, p, dim)
    return reason or ("ties share the gradient" if math.isinf(_order(p)) else "")


@norm.cuda_vjp("reduction", "input", when=_norm_gradient_condition)
def _(k: Launcher, g: Array, input: Array, out: Array, p: float | str | None, dim: Dims, keepdim: bool) -> Array:
    g, n = (spread(k.xp, a, input.shape, reduced_dims(input, dim), keepdim) for a in (g, out))
    expression = "n == 0.f ? 0.f : g * (input / n)" if _order(p) == 2.0 else "g * sign(input)"
    return k.elementwise((expression,), {"input": input, "g": g, "n": n}, (input.dtype,), input.shape)[0]


norm.perf_samples(
    sample((3, 700, 40), 2, 1), sample((3, 70, 640)), sample((300, 77), 1, -1), sample((3, 700, 40), math.inf, (0, 1))
)

norm.samples(
    sample((2, 3, 4)),
    sample((2, 3, 4), 2, -1),
    sample((2, 3, 4), None, (0, 1)),
    sample(apart(2, 3, 4), 1, (0, 2), keepdim=True),
    sample(apart(2, 3), 3.5, 1),
    sample(apart(2, 3), 0.7, 0),
    sample((2, 3), float("inf"), 0),
    sample(apart(2, 3), float("-inf")),
    sample((2, 3), 0, 1),
)

norm.errors(
    ErrorSample(sample((2, 3), "nuc"), ValueError, "a number or 'fro', got 'nuc'"),
    ErrorSample(sample((2, 0), math.inf, 1), ShapeError, "at least one value over dims"),
)
