"""Softmax and its logarithm."""

from __future__ import annotations

import math

from ...errors import ShapeError
from ..backend.cuda.codegen.kernel_ir import Operands, Program
from ..backend.cuda.launcher import Launcher
from ..dtype import Array
from ..namespace import Namespace
from ..op import ErrorSample, Op, composite, primitive, sample
from ..op_samples import no_such_dim
from ..ops.common.dims import Dims, axes, spread
from ..ops.common.row_kernels import row_program, rows_at, why_not_rows
from ..sums import accurate_sum
from ..tensors.tensor import Tensor


@primitive(torch="nn.functional.softmax")
def softmax(xp: Namespace, input: Array, dim: int) -> Array:
    """exp(input) / sum(exp(input)) along dim, computed from input - max(input)"""
    e = xp.exp(_shifted(xp, input, dim, "softmax"))
    return e / xp.sum(e, axis=axes(dim, input.ndim, "softmax"), keepdims=True)


def _shifted(xp: Namespace, x: Array, dim: int, op: str) -> Array:
    """x - max(x) along dim, so that no exponential overflows."""
    dims = axes(dim, x.ndim, op)
    return x - xp.max(x, axis=dims, keepdims=True) if x.size else x


@softmax.vjp("input")
def _(xp: Namespace, g: Array, out: Array, dim: int) -> Array:
    return out * (g - xp.sum(g * out, axis=axes(dim, g.ndim, "softmax"), keepdims=True))


@composite(torch="nn.functional.softmin")
def softmin(input: Tensor, dim: int) -> Tensor:
    """softmax(-input) along dim"""
    return softmax(-input, dim)


@primitive(torch="nn.functional.log_softmax")
def log_softmax(xp: Namespace, input: Array, dim: int) -> Array:
    """input - log(sum(exp(input))) along dim, computed from input - max(input)"""
    shifted = _shifted(xp, input, dim, "log_softmax")
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axes(dim, input.ndim, "log_softmax"), keepdims=True))


@log_softmax.vjp("input")
def _(xp: Namespace, g: Array, out: Array, dim: int) -> Array:
    return g - xp.exp(out) * xp.sum(g, axis=axes(dim, g.ndim, "log_softmax"), keepdims=True)


def _last(input: Array, dim: int) -> str:
    if not -max(input.ndim, 1) <= dim < max(input.ndim, 1) or input.ndim == 0:
        return "no such dim"
    if dim % input.ndim != input.ndim - 1:
        return "only along the last dim"
    return why_not_rows(input, 1)


_SHIFTED = ("max m = input", "row e = e_to(input - m)", "sum s = e")

_SOFTMAX = Program((*_SHIFTED, "let r = 1.f / s"), ("e * r",))

_SOFTMAX_GRADIENT = Program(("sum d = g * out",), ("out * (g - d)",))

_LOG_SOFTMAX = Program(("max m = input", "sum s = e_to(input - m)", "let l = logf(s)"), ("input - m - l",))

_LOG_SOFTMAX_GRADIENT = Program(("sum d = g",), ("g - e_to(out) * d",))


def _along_rows(op: Op, value: Program, slope: Program) -> None:
    @op.cuda("rows", when=_last)
    def _(k: Launcher, input: Array) -> Array:
        return row_program(k, value, Operands({"input": rows_at(k, input)}), input.dtype, input.shape, 1)

    @op.cuda_vjp("rows", "input", when=_last)
    def _(k: Launcher, g: Array, out: Array) -> Array:
        return row_program(k, slope, Operands({"g": rows_at(k, g), "out": rows_at(k, out)}), g.dtype, g.shape, 1)

    op.perf_samples(sample((3, 4096), -1), sample((5, 7, 640), -1), sample((200, 77), -1))


_along_rows(softmax, _SOFTMAX, _SOFTMAX_GRADIENT)

_along_rows(log_softmax, _LOG_SOFTMAX, _LOG_SOFTMAX_GRADIENT)

for _op in (softmax, softmin, log_softmax):
    _op.samples(sample((2, 3, 5), -1), sample((4, 3), 0), sample((3, 1), 1), sample((0, 2), -1))
    _op.errors(ErrorSample(sample((2, 3), 2), ShapeError, "softmax: dim 2 is outside a tensor of 2 dims"))


@primitive(torch="logsumexp")
def logsumexp(xp: Namespace, input: Array, dim: Dims, keepdim: bool = False) -> Array:
    """log(sum(exp(input))) over dim, computed from input - max(input)"""
    dims = axes(dim, input.ndim, "logsumexp")
    kept = [1 if i in dims else n for i, n in enumerate(input.shape)]
    row_max = xp.max(input, axis=dims, keepdims=True) if input.size else xp.zeros(kept, input.dtype)
    row_max = xp.where(xp.isfinite(row_max), row_max, 0.0)
    total = xp.log(accurate_sum(xp.sum, xp.exp(input - row_max), dims, True)) + row_max
    return total if keepdim else xp.squeeze(total, dims)


@logsumexp.vjp("input")
def _(xp: Namespace, g: Array, input: Array, out: Array, dim: Dims, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "logsumexp")
    g, out = (spread(xp, a, input.shape, dims, keepdim) for a in (g, out))
    return g * xp.exp(input - xp.where(out == -math.inf, 0.0, out))


def _last_dims(input: Array, dim: Dims) -> str:
    if input.ndim == 0:
        return "no dim"
    dims = axes(dim, input.ndim, "logsumexp")
    if sorted(dims) != list(range(input.ndim - len(dims), input.ndim)):
        return "only along the last dims"
    return why_not_rows(input, len(dims))


@logsumexp.cuda("rows", when=_last_dims)
def _(k: Launcher, input: Array, dim: Dims, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "logsumexp")
    program = Program(
        ("max row_max = input", "let m = fabsf(row_max) < INFINITE ? row_max : 0.f", "sum s = e_to(input - m)"),
        (),
        ("logf(s) + m",),
    )
    total = k.rows(program, Operands({"input": rows_at(k, input, len(dims))}), (input.dtype,))[0]
    lead = input.shape[: input.ndim - len(dims)]
    return total.reshape((*lead, *[1] * len(dims)) if keepdim else lead)


@logsumexp.cuda_vjp("rows", "input", when=_last_dims)
def _(k: Launcher, g: Array, input: Array, out: Array, dim: Dims, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "logsumexp")
    g, out = (spread(k.xp, a, input.shape, dims, keepdim) for a in (g, out))
    expression = "g * e_to(input - (out == -INFINITE ? 0.f : out))"
    return k.elementwise((expression,), {"input": input, "g": g, "out": out}, (input.dtype,))[0]


logsumexp.perf_samples(sample((3, 5000), -1), sample((5, 7, 640), (-1, -2), keepdim=True))

logsumexp.errors(no_such_dim())

logsumexp.samples(sample((2, 3, 5), -1), sample((4, 3), (0, 1), keepdim=True), sample((3, 1), 1), sample((0, 3), 1))
