"""Linear layers whose weights are stored in 8 bits with a factor for each row: e4m3 in uint8 (`e4m3.py`), or int8.

By itself that only saves memory: the weight is decoded to the activations' dtype, and multiplied in it. With `dynamic`
the rows of activations and gradients are rounded to the same format, each with a factor of its own. Products are then
of 8 bits by 8 bits, at about twice the rate; `docs/numerics.md` says how their sums are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.products import LowRank
from ...dtype import Array, float32, int8, uint8
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from . import convrot, e4m3
from . import int8 as whole
from .e4m3 import factors
from .matmul import check_linear, check_residual, product_to, residual_fits, rows_product
from .scaled_storage import LONGEST, belong, check_stored, decode, encode, stored, weight_of

_HEADER, _BLOCK, _TILE = "ops/linear/scaled.cuh", 256, 64  # as in that header


@primitive()
def scaled_linear(
    xp: Namespace,
    input: Array,
    data: Array,
    scales: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    dynamic: bool = False,
    rotated: int = 0,
) -> Array:
    """linear(input, scaled_dequantize(data, scales), bias) + residual; with dynamic of input's rows rounded as data are

    Args:
        data: e4m3 in uint8, or int8 (out, in).
        scales: the bits of fp32 factors, uint32 (out,).
        dynamic: whether input's rows are rounded to data's format.
        rotated: data's columns that are rotated together, see `convrot.py`; 0: none. Then input's are, too.

    Returns:
        (..., out).
    """
    check_layer(input, data, scales, residual, "scaled_linear", rotated)
    y = stored_product(xp, input, data, scales, dynamic, rotated)
    for term in (bias, residual):
        y = y if term is None else y + term
    return y


scaled_linear.non_differentiable("data", "scales")


def check_layer(input: Array, data: Array, scales: Array, residual: Array | None, op: str, rotated: int = 0) -> None:
    """Raises ShapeError or TypeError unless data, scales and residual are a layer's and fit the input.

    Args:
        data: e4m3 in uint8, or int8 (out, in).

    Raises:
        ShapeError: sizes do not fit.
        TypeError: data or scales have another dtype.
    """
    check_stored(data, scales, op, rotated)
    check_linear(input, data)
    check_residual(op, input, data, residual)


def stored_product(xp: Namespace, input: Array, data: Array, scales: Array, dynamic: bool, rotated: int = 0) -> Array:
    """Returns input @ weight^T; with `dynamic` of its rounded rows, and of int8 exact before factors are applied.

    Args:
        data: e4m3 in uint8, or int8 (out, in).
        dynamic: whether input's rows are rounded to data's format.

    Returns:
        (..., out).
    """
    if dynamic and data.dtype == int8:
        return _whole_product(xp, convrot.rotated(xp, input, rotated), data.T) * factors(scales, input.dtype)
    seen = e4m3.rounded(xp, input) if dynamic else input
    return rows_product(xp, seen, weight_of(xp, data, scales, input.dtype, rotated).T)


def _whole_product(xp: Namespace, x: Array, columns: Array) -> Array:
    """Returns the rows of x (..., K), rounded to int8, by columns (K, N) of int8, in x's dtype."""
    rows, scales = whole.encoded(xp, x.reshape(-1, x.shape[-1]))
    made = whole.product(xp, rows, columns).astype(x.dtype) * factors(scales, x.dtype)[:, None]
    return made.reshape(*x.shape[:-1], columns.shape[1])


def input_grad(xp: Namespace, g: Array, data: Array, scales: Array, dynamic: bool, rotated: int = 0) -> Array:
    """Returns g @ weight, the gradient of a layer's input; with `dynamic` its rows are rounded.

    Each row of the weight meets one column of g, so its factor is multiplied into that column before the rounding.

    Args:
        data, scales: as in `stored_product`.
        dynamic: whether g's rows are rounded to data's format.

    Returns:
        (..., in).
    """
    if not dynamic:
        return rows_product(xp, g, weight_of(xp, data, scales, g.dtype, rotated))
    g = g * factors(scales, g.dtype)
    if data.dtype == int8:
        return convrot.rotated(xp, _whole_product(xp, g, data), rotated)
    return rows_product(xp, e4m3.rounded(xp, g), e4m3.decoded(xp, data, g.dtype))


scaled_linear.vjp("input")(
    lambda xp, g, data, scales, dynamic, rotated: input_grad(xp, g, data, scales, dynamic, rotated)
)
scaled_linear.vjp("bias")(lambda xp, g: g)
scaled_linear.vjp("residual")(lambda xp, g: g)
scaled_linear.samples(
    lambda: (
        sample((3, 4), *stored(5, 4), (5,)),
        sample((3, 4), *stored(5, 4, dtype=int8), (5,)),
        sample((2, 3, 4), *stored(5, 4), None, (2, 3, 5)),
        sample((2, 3, 4), *stored(5, 4), (5,), (2, 3, 5)),
        sample((2, 3, 16), *stored(5, 16, dtype=int8), (5,), (2, 3, 5), rotated=16),
    )
)
scaled_linear.perf_samples(
    lambda: (
        sample((2, 77, 640), *stored(1280, 640), (1280,), (2, 77, 1280)),
        sample((333, 256), *stored(144, 256)),
        sample((2, 77, 640), *stored(1280, 640), (1280,), (2, 77, 1280), dynamic=True),
        sample((333, 256), *stored(144, 256), dynamic=True),
        sample((333, 9728), *stored(256, 9728), (256,), dynamic=True),
        *(sample((333, 256), *stored(144, 256, dtype=int8), dynamic=way) for way in (False, True)),
        *(
            sample((2, 77, 640), *stored(1280, 640, dtype=int8), (1280,), (2, 77, 1280), dynamic=True, rotated=group)
            for group in (0, 64)
        ),
        *(sample((333, 512), *stored(144, 512, dtype=int8), dynamic=way, rotated=256) for way in (False, True)),
    )
)


def _scaled_linear_errors() -> Iterator[ErrorSample]:
    data, scales = stored(5, 4)
    yield ErrorSample(sample((2, 3), data, scales), ShapeError, r"last dim 3 but weight is \(5, 4\)")
    yield ErrorSample(sample((2, 4), data, scales[:3]), ShapeError, r"scales of shape \(5,\), got \(3,\)")
    yield ErrorSample(sample((2, 4), data, scales, None, (5,)), ShapeError, r"the result's shape, got \(5,\)")
    yield ErrorSample(sample((2, 4), data.astype(np.int64), scales), TypeError, "data in uint8 or int8, .*, got int64")


scaled_linear.errors(_scaled_linear_errors)


# ---- kernels -----------------------------------------------------------------------------------------------


def transposed(k: Launcher, data: Array) -> Array:
    """The transpose (C, R) of data (R, C), both multiples of 16, in memory: 8-bit products only go along rows."""
    rows, width = data.shape
    made = k.empty((width, rows), data.dtype)
    grid = -(-width // _TILE), -(-rows // _TILE)
    operands = data.view(uint8), made.view(uint8), np.int32(rows), np.int32(width)
    k.launch_header(_HEADER, "turn", {"T": float32, "WIDTH": 1}, grid, _BLOCK, operands)
    return made


def storage(input: Array, data: Array, dynamic: bool, *others: Array | None) -> str:
    """Says why the weight cannot be decoded for a product in the activations' dtype; "" if it can."""
    if dynamic:
        return "`dynamic` demands products of 8 bits"
    if input.ndim < 2 or 0 in data.shape or data.size >= 2**31 or input.size == 0:
        return "a vector operand, or nothing to multiply with"
    return conditions.same(conditions.AT_MOST_FP32, input, *others)


def products(input: Array, data: Array, dynamic: bool, *others: Array | None) -> str:
    """Says why cuBLASLt cannot make a product of 8 bits; "" if it can."""
    if not dynamic:
        return "only `dynamic` demands products of 8 bits"
    if input.ndim < 2 or input.size == 0 or any(n % 16 or n > LONGEST for n in data.shape):
        return f"a weight of shape {tuple(data.shape)}: expected multiples of 16, up to {LONGEST}"
    capability = int(input.device.compute_capability)
    if data.dtype == uint8 and not e4m3.multiplied(capability):
        return "a factor a row of e4m3 needs compute capability 9.0 or 12"
    if capability < 80:
        return "products of int8 need compute capability 8.0"
    return conditions.same(conditions.LOW, input, *others)


def fits(input: Array, data: Array, scales: Array, residual: Array | None = None, rotated: int = 0) -> bool:
    """Tells whether `check_layer` accepts these, and kernels the group."""
    stored = belong(data, scales, rotated) and data.ndim == 2 and not convrot.unfit(rotated)
    stored = stored and bool(input.ndim) and input.shape[-1] == data.shape[-1]
    return stored and residual_fits(input, data, residual)


def _refused(input: Array, data: Array, scales: Array, residual: Array | None, rotated: int) -> str:
    return "" if fits(input, data, scales, residual, rotated) else "arguments that are refused"


def _storage(input: Array, data: Array, bias: Array | None, residual: Array | None, dynamic: bool) -> str:
    return storage(input, data, dynamic, bias, residual)


def _products(input: Array, data: Array, bias: Array | None, residual: Array | None, dynamic: bool) -> str:
    return products(input, data, dynamic, bias, residual)


@scaled_linear.cuda("cublaslt", when=(_refused, _storage))
def _(
    k: Launcher, input: Array, data: Array, scales: Array, bias: Array | None, residual: Array | None, rotated: int
) -> Array:
    return k.matmul(input, decode(k, data, scales, input.dtype, rotated).T, bias=bias, plus=residual)


@scaled_linear.cuda_vjp("cublaslt", "input", when=(_refused, _storage))
def _(k: Launcher, g: Array, data: Array, scales: Array, rotated: int, targets: GradTargets) -> Array:
    weight = decode(k, data, scales, g.dtype, rotated)
    return product_to(k, targets["input"], g, weight)


@scaled_linear.cuda("scaled", when=(_refused, _products))
def _(
    k: Launcher, input: Array, data: Array, scales: Array, bias: Array | None, residual: Array | None, rotated: int
) -> Array:
    out = k.empty((*input.shape[:-1], len(data)), input.dtype)
    rounded = encode(k, input, data.dtype, rotated=rotated)
    k.scaled_product(rounded, (k.contiguous(data), scales), out=out, bias=bias, plus=residual)
    return out


@scaled_linear.cuda_vjp("scaled", "input", when=(_refused, _products))
def _(k: Launcher, g: Array, data: Array, scales: Array, rotated: int, targets: GradTargets) -> Array:
    return scaled_product_to(k, g, data, scales, targets["input"], rotated=rotated)


def scaled_product_to(
    k: Launcher,
    g: Array,
    data: Array,
    scales: Array,
    target: GradTarget,
    value: str = "x",
    other: Array | None = None,
    rotated: int = 0,
    low: LowRank | None = None,
) -> Array:
    """Returns g @ weight by a product of 8 bits, as the gradient at `target`.

    `value` and `other`, as in `encode`, replace g by an expression over it.

    Args:
        data: e4m3 in uint8, or int8 (out, in).
        value, other: as in `encode`.
        rotated: data's columns that are rotated together; 0: none.
        low: what `Launcher.scaled_product` adds, or None.

    Returns:
        (..., in).
    """
    if target.addend is not None and target.addend.dtype != g.dtype:
        return target.addend + scaled_product_to(k, g, data, scales, ALLOCATE, value, other, rotated, low)
    shape = (*g.shape[:-1], data.shape[1])
    buffer = target.buffer
    made = buffer if buffer is not None and buffer.flags.c_contiguous else k.empty(shape, g.dtype)
    columns = transposed(k, k.contiguous(data))
    ones = None if data.dtype == int8 else k.ones[: data.shape[1]]
    rounded = encode(k, g, data.dtype, scales, value, other)
    k.scaled_product(rounded, (columns, ones), out=made, plus=target.addend, rotated=rotated, low=low)
    return made
