"""Products."""

from __future__ import annotations

import math

import numpy as np

from ...backend.cuda.codegen.kernel_ir import Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import Values, no_such_dim
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import axes, spread
from .reduce import reducing

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
    """Why the kernel of the gradient cannot take `input`; "" if it can."""
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
    k.launch_header("ops/reduction/prod.cuh", "product_gradient", names, grid, _THREADS, args)
    return dx


prod.errors(no_such_dim())
prod.perf_samples(
    sample(Values((3, 70, 640), 0.9, 1.1), -1),
    sample(Values((3, 700, 40), 0.9, 1.1), 1, keepdim=True),
    sample(Values((60, 9001), 0.99, 1.01), -1),
)


prod.samples(sample((2, 3)), sample((2, 3, 4), 1), sample((2, 3, 4), -1, keepdim=True), sample((), 0))
