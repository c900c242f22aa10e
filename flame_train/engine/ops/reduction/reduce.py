"""Sums and their kin, with `dim` and `keepdim` as in PyTorch; without `dim` over everything."""

from __future__ import annotations

import math

from ....errors import ShapeError
from ...backend.cuda.codegen.kernel_ir import Operands, Program, Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from ...namespace import Namespace
from ...op import ErrorSample, Op, primitive, sample
from ...op_samples import no_such_dim
from ...sums import accurate_sum
from ..common.dims import Dims, Shape, axes, spread
from ..common.row_kernels import extent, reduce, reduced_rows, why_not_reduction


@primitive(torch="sum", accepts_integers=True)
def sum(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The sum over dim"""
    return accurate_sum(xp.sum, input, axes(dim, input.ndim, "sum"), keepdim)


@sum.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, dim: Dims, keepdim: bool) -> Array:
    return spread(xp, g, input_shape, axes(dim, len(input_shape), "sum"), keepdim)


@primitive(torch="mean")
def mean(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """The mean over dim"""
    return accurate_sum(xp.mean, input, axes(dim, input.ndim, "mean"), keepdim)


@mean.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, dim: Dims, keepdim: bool) -> Array:
    dims = axes(dim, len(input_shape), "mean")
    return spread(xp, g / max(count_along(input_shape, dims), 1), input_shape, dims, keepdim)


def count_along(shape: Shape, dims: tuple[int, ...]) -> int:
    return math.prod(shape[d] for d in dims)


@primitive(torch="var", aux=("mean",))
def var(
    xp: Namespace, input: Array, dim: Dims = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Array, Array]:
    """sum((input - mean)^2) / (count - correction) over dim

    Args:
        dim: the dim or dims; None: all.
        correction: what is taken off the count that is divided by.
        keepdim: keeps reduced dims, with size 1.

    Returns:
        The variance, and the mean with the reduced dims kept as size 1.
    """
    return _variance(xp, input, axes(dim, input.ndim, "var"), _given(correction), keepdim)


def _given(correction: float | None) -> float:
    """Returns the correction; None means 1, as in PyTorch."""
    return 1 if correction is None else correction


def _variance(xp: Namespace, x: Array, dims: tuple[int, ...], correction: float, keepdim: bool) -> tuple[Array, Array]:
    """Returns the variance, and the mean with the reduced dims kept as size 1."""
    mean = accurate_sum(xp.mean, x, dims, True)
    centred = x - mean
    return accurate_sum(xp.sum, centred * centred, dims, keepdim) / max(
        count_along(x.shape, dims) - correction, 0
    ), mean


def _variance_derivative(x: Array, mean: Array, dims: tuple[int, ...], correction: float) -> Array:
    """Returns d variance / d x."""
    return (x - mean) * _freedom(x.shape, dims, correction)


def _freedom(shape: Shape, dims: tuple[int, ...], correction: float) -> float:
    freedom = count_along(shape, dims) - correction
    return 2.0 / freedom if freedom else math.inf


@var.vjp("input")
def _(xp: Namespace, g: Array, input: Array, mean: Array, dim: Dims, correction: float | None, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "var")
    return spread(xp, g, input.shape, dims, keepdim) * _variance_derivative(input, mean, dims, _given(correction))


@primitive(torch="std", aux=("mean",))
def std(
    xp: Namespace, input: Array, dim: Dims = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Array, Array]:
    """sqrt(sum((input - mean)^2) / (count - correction)) over dim; the gradient at zero is zero

    Args:
        input, dim, correction, keepdim: as in `var`.

    Returns:
        The deviation, and the mean with the reduced dims kept as size 1.
    """
    variance, mean = _variance(xp, input, axes(dim, input.ndim, "std"), _given(correction), keepdim)
    return xp.sqrt(variance), mean


@std.vjp("input")
def _(
    xp: Namespace, g: Array, input: Array, out: Array, mean: Array, dim: Dims, correction: float | None, keepdim: bool
) -> Array:
    dims = axes(dim, input.ndim, "std")
    half = xp.where(out == 0, 0.0, g / (2.0 * xp.where(out == 0, 1.0, out)))
    return spread(xp, half, input.shape, dims, keepdim) * _variance_derivative(input, mean, dims, _given(correction))


def neighbours(input: Array, dim: Dims) -> str:
    """Says why the reduction kernels cannot take `input` over `dim`; "" if they can."""
    if not input.ndim:
        return "a single number"
    try:
        return why_not_reduction(input, reduced_dims(input, dim))
    except ShapeError:
        return "arguments that are refused"


def reduced_dims(x: Array, dim: Dims) -> tuple[int, ...]:
    return axes(dim, x.ndim, "reduction")


def with_dims(kept: Array, dims: tuple[int, ...], keepdim: bool) -> Array:
    """Returns a reduction's result with the reduced dims kept as size 1, as it is given, or removed."""
    return kept if keepdim else kept.reshape([n for i, n in enumerate(kept.shape) if i not in dims])


def reducing(op: Op, reduction: Reduction) -> None:
    """Declares the kernel of an op that reduces over neighbouring dims."""

    @op.cuda("reduction", when=neighbours)
    def _(k: Launcher, input: Array, dim: Dims, keepdim: bool) -> Array:
        dims = reduced_dims(input, dim)
        return with_dims(reduce(k, reduction, {"input": input}, dims, input.dtype), dims, keepdim)


reducing(sum, Reduction("sum", "input"))

reducing(mean, Reduction("sum", "input", "total / n"))


@sum.cuda_vjp("reduction", "input")
def _(k: Launcher, g: Array, input_shape: Shape, dim: Dims, keepdim: bool) -> Array:
    return spread(k.xp, g, input_shape, axes(dim, len(input_shape), "sum"), keepdim)


@mean.cuda_vjp("reduction", "input", when=neighbours)
def _(k: Launcher, g: Array, input_shape: Shape, dim: Dims, keepdim: bool) -> Array:
    dims = axes(dim, len(input_shape), "mean")
    share = k.elementwise(("g / count",), {"g": g, "count": count_along(input_shape, dims)}, (g.dtype,))[0]
    return spread(k.xp, share, input_shape, dims, keepdim)


def _squares(k: Launcher, x: Array, dims: tuple[int, ...], result: str, correction: float) -> tuple[Array, Array]:
    """Computes `result` of the sum of squared differences from the fp32 mean: by row kernels, or by `Moments`."""
    numbers, e = {"correction": correction}, extent(x.shape, dims)
    assert e is not None
    shape = [1 if i in dims else n for i, n in enumerate(x.shape)]
    if (rows := reduced_rows(k, x, dims)) is not None:
        steps = ("sum s = input", "let mean = s / n", "sum total = (input - mean) * (input - mean)")
        operands = Operands({"input": rows}, numbers=numbers)
        found, mean = k.rows(Program(steps, (), (result, "mean")), operands, (x.dtype, float32))
    else:
        dense = k.contiguous(x).reshape(e.outer, e.reduced, e.inner)
        found, mean = k.moments(dense, result, numbers, x.dtype)
    return found.reshape(shape), mean.reshape(shape)


_VARIANCE = "total / fmaxf(n - correction, 0.f)"


def _measuring(op: Op, result: str) -> None:
    """Declares the kernel of an op that is the expression `result` of `_squares`."""

    @op.cuda("reduction", when=neighbours)
    def _(k: Launcher, input: Array, dim: Dims, correction: float | None, keepdim: bool) -> tuple[Array, Array]:
        dims = reduced_dims(input, dim)
        found, mean = _squares(k, input, dims, result, _given(correction))
        return with_dims(found, dims, keepdim), mean


_measuring(var, _VARIANCE)

_measuring(std, f"sqrtf({_VARIANCE})")


def _away_from_mean(
    k: Launcher, factor: str, x: Array, mean: Array, dims: tuple[int, ...], correction: float, **more: Array
) -> Array:
    """Returns `factor` times the variance's derivative 2 (x - mean) / (count - correction)."""
    operands = {"input": x, "mean": mean, **more, "slope": _freedom(x.shape, dims, correction)}
    return k.elementwise((f"{factor} * (input - mean) * slope",), operands, (x.dtype,))[0]


@var.cuda_vjp("reduction", "input", when=neighbours)
def _(k: Launcher, g: Array, input: Array, mean: Array, dim: Dims, correction: float | None, keepdim: bool) -> Array:
    dims = reduced_dims(input, dim)
    spread_g = spread(k.xp, g, input.shape, dims, keepdim)
    return _away_from_mean(k, "g", input, mean, dims, _given(correction), g=spread_g)


@std.cuda_vjp("reduction", "input", when=neighbours)
def _(
    k: Launcher, g: Array, input: Array, out: Array, mean: Array, dim: Dims, correction: float | None, keepdim: bool
) -> Array:
    dims = reduced_dims(input, dim)
    g, out = (spread(k.xp, a, input.shape, dims, keepdim) for a in (g, out))
    half = "(out == 0.f ? 0.f : g / (2.f * out))"
    return _away_from_mean(k, half, input, mean, dims, _given(correction), g=g, out=out)


for _op in (sum, mean, var, std):
    _op.perf_samples(
        sample((3, 70, 640), -1),
        sample((3, 700, 40), 1),
        sample((3, 70, 641), (0, 1), keepdim=True),
        sample((5, 20001), -1),
        sample((77, 2048)),
    )

for _op in (mean, var, std):
    _op.errors(no_such_dim())

for _op in (sum, mean, var, std):
    _op.samples(
        sample((2, 3, 4)),
        sample((2, 3, 4), 1),
        sample((2, 3, 4), (0, 2), keepdim=True),
        sample((2, 3, 4), -1, keepdim=True),
    )

sum.errors(
    ErrorSample(sample((2, 3), 2), ShapeError, "sum: dim 2 is outside a tensor of 2 dims"),
    ErrorSample(sample((2, 3), (0, -2)), ShapeError, r"a dim appears twice in \(0, -2\)"),
)
