"""Linear layers whose weights are stored in 8 bits, e4m3 with a power of two for each row; see `e4m3.py`.

By itself that only saves memory: the weight is decoded to the activations' dtype, and multiplied in it. With `dynamic`
the rows of activations and gradients are rounded to e4m3 as well, each with a factor of its own. Products are then of
8 bits by 8 bits, at about twice the rate; `docs/numerics.md` says how their sums are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.codegen.kernel_ir import Operands, Program, Table
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, as_dtype, bfloat16, compute_dtype, float32, uint8, uint32
from ...grad_target import ALLOCATE, GradTarget, GradTargets
from ...namespace import NUMPY, Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from ..common.dims import at_least
from .e4m3 import decoded, encoded, factors, rounded
from .matmul import check_linear, check_residual, product_to, residual_fits, rows_product

_HEADER, _BLOCK, _TILE = "ops/linear/fp8.cuh", 256, 64  # as in that header
_LONGEST = 1 << 16  # elements of a row, which one block keeps in registers; `Launcher.ones` has as many


@primitive(multiple=True)
def fp8_quantize(xp: Namespace, input: Array) -> tuple[Array, Array]:
    """input (..., C) in e4m3, uint8, and each row's factor (...), the bits of a float32: data and scales"""
    at_least(1, input.shape, "fp8_quantize")
    return encoded(xp, input)


fp8_quantize.non_differentiable("input")


fp8_quantize.samples(sample((3, 16)), sample((2, 3, 5)), sample((0, 4)))
fp8_quantize.perf_samples(sample((3, 77, 640)), sample((5, 5120)), sample((70, 131)))
fp8_quantize.errors(ErrorSample(sample(()), ShapeError, "at least 1 dim"))


@primitive(data_movement=True)
def fp8_dequantize(xp: Namespace, data: Array, scales: Array, dtype: DType) -> Array:
    """The numbers (..., C) that `fp8_quantize` stored, in dtype"""
    _check_stored(data, scales, "fp8_dequantize")
    dtype = as_dtype(dtype)
    return weight_of(xp, data, scales, compute_dtype(dtype)).astype(dtype)


fp8_dequantize.non_differentiable("data", "scales")


def stored(*shape: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Data and scales of a normally distributed matrix, for samples."""
    return encoded(NUMPY, np.random.default_rng(shape).standard_normal(shape).astype(np.float32))


fp8_dequantize.samples(sample(*stored(5, 16), np.dtype(np.float64)), sample(*stored(2, 3, 5), np.dtype(np.float64)))
fp8_dequantize.perf_samples(sample(*stored(77, 640), bfloat16))


def _fp8_dequantize_errors() -> Iterator[ErrorSample]:
    data, scales = stored(5, 16)
    yield ErrorSample(sample(data, scales[:4], float32), ShapeError, r"expected scales of shape \(5,\), got \(4,\)")


fp8_dequantize.errors(*_fp8_dequantize_errors())


def _check_stored(data: Array, scales: Array, op: str) -> None:
    if (data.dtype, scales.dtype) != (uint8, uint32):
        raise TypeError(f"{op}: expected data in uint8 and scales in uint32, got {data.dtype} and {scales.dtype}")
    if not data.ndim or scales.shape != data.shape[:-1]:
        raise ShapeError(f"{op}: expected scales of shape {tuple(data.shape[:-1])}, got {tuple(scales.shape)}")


@primitive()
def fp8_linear(
    xp: Namespace,
    input: Array,
    data: Array,
    scales: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    dynamic: bool = False,
) -> Array:
    """linear(input, fp8_dequantize(data, scales), bias) + residual; with dynamic of input's rows rounded to e4m3

    Args:
        xp: the array namespace.
        input: (..., in).
        data: e4m3, uint8 (out, in).
        scales: the bits of fp32 factors, uint32 (out,).
        bias: (out,), or None.
        residual: (..., out), or None.
        dynamic: whether input's rows are rounded to e4m3.

    Returns:
        (..., out).
    """
    check_layer(input, data, scales, residual, "fp8_linear")
    y = rows_product(xp, rounded(xp, input) if dynamic else input, weight_of(xp, data, scales, input.dtype).T)
    for term in (bias, residual):
        y = y if term is None else y + term
    return y


fp8_linear.non_differentiable("data", "scales")


def check_layer(input: Array, data: Array, scales: Array, residual: Array | None, op: str) -> None:
    """Raises ShapeError or TypeError unless data, scales and residual are a layer's and fit the input.

    Args:
        input: (..., in).
        data: e4m3, uint8 (out, in).
        scales: uint32 (out,).
        residual: (..., out), or None.
        op: the name in messages.

    Raises:
        ShapeError: sizes do not fit.
        TypeError: data or scales have another dtype.
    """
    _check_stored(data, scales, op)
    check_linear(input, data)
    check_residual(op, input, data, residual)


def weight_of(xp: Namespace, data: Array, scales: Array, dtype: DType) -> Array:
    """The decoded weight."""
    return decoded(xp, data, dtype) * factors(scales, dtype)[..., None]


def broadcast_grad(xp: Namespace, g: Array, data: Array, scales: Array, dynamic: bool) -> Array:
    """g @ weight, the gradient of a layer's input; with `dynamic` its rows are rounded.

    Each row of the weight meets one column of g, so its factor is multiplied into that column before the rounding.

    Args:
        xp: the array namespace.
        g: (..., out).
        data: e4m3, uint8 (out, in).
        scales: uint32 (out,).
        dynamic: whether g's rows are rounded to e4m3.

    Returns:
        (..., in).
    """
    if not dynamic:
        return rows_product(xp, g, weight_of(xp, data, scales, g.dtype))
    return rows_product(xp, rounded(xp, g * factors(scales, g.dtype)), decoded(xp, data, g.dtype))


fp8_linear.vjp("input")(lambda xp, g, data, scales, dynamic: broadcast_grad(xp, g, data, scales, dynamic))
fp8_linear.vjp("bias")(lambda xp, g: g)
fp8_linear.vjp("residual")(lambda xp, g: g)
fp8_linear.samples(
    sample((3, 4), *stored(5, 4), (5,)),
    sample((2, 3, 4), *stored(5, 4), None, (2, 3, 5)),
    sample((2, 3, 4), *stored(5, 4), (5,), (2, 3, 5)),
)
fp8_linear.perf_samples(
    sample((2, 77, 640), *stored(1280, 640), (1280,), (2, 77, 1280)),
    sample((333, 256), *stored(144, 256)),
    sample((2, 77, 640), *stored(1280, 640), (1280,), (2, 77, 1280), dynamic=True),
    sample((333, 256), *stored(144, 256), dynamic=True),
    sample((333, 9728), *stored(256, 9728), (256,), dynamic=True),
)


def _fp8_linear_errors() -> Iterator[ErrorSample]:
    data, scales = stored(5, 4)
    yield ErrorSample(sample((2, 3), data, scales), ShapeError, r"last dim 3 but weight is \(5, 4\)")
    yield ErrorSample(sample((2, 4), data, scales[:3]), ShapeError, r"scales of shape \(5,\), got \(3,\)")
    yield ErrorSample(sample((2, 4), data, scales, None, (5,)), ShapeError, r"the result's shape, got \(5,\)")
    yield ErrorSample(sample((2, 4), data.astype(np.int64), scales), TypeError, "data in uint8 .*, got int64")


fp8_linear.errors(*_fp8_linear_errors())


# ---- kernels -----------------------------------------------------------------------------------------------


def _rows_to_encode(input: Array) -> str:
    if input.ndim == 0 or input.size == 0 or input.size >= 2**31:
        return "nothing to encode, or too much"
    if input.shape[-1] > _LONGEST:
        return f"rows of {input.shape[-1]} are longer than {_LONGEST}"
    return conditions.same(conditions.AT_MOST_FP32, input)


@fp8_quantize.cuda("flame", when=_rows_to_encode)
def _(k: Launcher, input: Array) -> tuple[Array, Array]:
    data, scales = encode(k, input)
    return data.reshape(input.shape), scales.reshape(input.shape[:-1])


def encode(
    k: Launcher, x: Array, by: Array | None = None, value: str = "x", other: Array | None = None
) -> tuple[Array, Array]:
    """e4m3 data (M, C) and scales (M,) of the expression `value` over the elements of x (..., C) and of `other`.

    With `by` (C,), stored factors, each column is first multiplied by its own.

    Args:
        k: launches kernels.
        x: (..., C).
        by: stored factors of the columns, uint32 (C,), or None.
        value: the expression in C, over `x` and `other`.
        other: an array in the shape of x, or None.

    Returns:
        Data, uint8 (M, C), and scales, uint32 (M,).
    """
    rows = {"x": x} if other is None else {"x": x, "other": other}
    tables = {} if by is None else {"by": Table(by.view(float32))}
    taken = f"row y = {value}{'' if by is None else ' * by'}"
    steps = taken, "max largest = fabsf(y)", "let factor = factor_of(largest)", "let inverse = 1.f / factor"
    data, factor = k.rows(Program(steps, ("y * inverse",), ("factor",)), Operands(rows, tables), (uint8, float32))
    return data.reshape(-1, x.shape[-1]), factor.view(uint32)


def _stored_to_decode(data: Array, scales: Array, dtype: DType) -> str:
    if not data.ndim or (data.dtype, scales.dtype) != (uint8, uint32) or scales.shape != data.shape[:-1]:
        return "arguments that are refused"
    if as_dtype(dtype) not in conditions.AT_MOST_FP32:
        return f"no kernel for {dtype}"
    return "nothing to decode, or too much" if data.size == 0 or data.size >= 2**31 else ""


@fp8_dequantize.cuda("flame", when=_stored_to_decode)
def _(k: Launcher, data: Array, scales: Array, dtype: DType) -> Array:
    return decode(k, data, scales, as_dtype(dtype))


def decode(k: Launcher, data: Array, scales: Array, dtype: DType) -> Array:
    """The numbers that data and scales store, in `dtype`."""
    factor = scales.view(float32)[..., None]
    return k.elementwise(("data * factor",), {"data": data, "factor": factor}, (dtype,))[0]


def transposed(k: Launcher, data: Array) -> Array:
    """The transpose (C, R) of data (R, C), both multiples of 16, in memory: 8-bit products only go along rows."""
    rows, width = data.shape
    made = k.empty((width, rows), uint8)
    grid = -(-width // _TILE), -(-rows // _TILE)
    k.launch_header(
        _HEADER, "turn", {"T": float32, "WIDTH": 1}, grid, _BLOCK, (data, made, np.int32(rows), np.int32(width))
    )
    return made


def storage(input: Array, data: Array, dynamic: bool, *others: Array | None) -> str:
    """Why the weight cannot be decoded for a product in the activations' dtype; "" if it can."""
    if dynamic:
        return "`dynamic` demands products of 8 bits"
    if input.ndim < 2 or 0 in data.shape or data.size >= 2**31 or input.size == 0:
        return "a vector operand, or nothing to multiply with"
    return conditions.same(conditions.AT_MOST_FP32, input, *others)


def products(input: Array, data: Array, dynamic: bool, *others: Array | None) -> str:
    """Why cuBLASLt cannot make a product of 8 bits; "" if it can."""
    if not dynamic:
        return "only `dynamic` demands products of 8 bits"
    if input.ndim < 2 or input.size == 0 or any(n % 16 or n > _LONGEST for n in data.shape):
        return f"a weight of shape {tuple(data.shape)}: expected multiples of 16, up to {_LONGEST}"
    if int(input.device.compute_capability) != 90:
        return "a factor a row needs compute capability 9.0"
    return conditions.same(conditions.LOW, input, *others)


def fits(input: Array, data: Array, scales: Array, residual: Array | None = None) -> bool:
    """Whether `check_layer` accepts these."""
    stored = data.dtype == uint8 and scales.dtype == uint32 and data.ndim == 2 and scales.shape == data.shape[:1]
    stored = stored and bool(input.ndim) and input.shape[-1] == data.shape[-1]
    return stored and residual_fits(input, data, residual)


def _refused(input: Array, data: Array, scales: Array, residual: Array | None) -> str:
    return "" if fits(input, data, scales, residual) else "arguments that are refused"


def _storage(input: Array, data: Array, bias: Array | None, residual: Array | None, dynamic: bool) -> str:
    return storage(input, data, dynamic, bias, residual)


def _products(input: Array, data: Array, bias: Array | None, residual: Array | None, dynamic: bool) -> str:
    return products(input, data, dynamic, bias, residual)


@fp8_linear.cuda("cublaslt", when=(_refused, _storage))
def _(k: Launcher, input: Array, data: Array, scales: Array, bias: Array | None, residual: Array | None) -> Array:
    return k.matmul(input, decode(k, data, scales, input.dtype).T, bias=bias, plus=residual)


@fp8_linear.cuda_vjp("cublaslt", "input", when=(_refused, _storage))
def _(k: Launcher, g: Array, data: Array, scales: Array, targets: GradTargets) -> Array:
    weight = decode(k, data, scales, g.dtype)
    return product_to(k, targets["input"], g, weight)


@fp8_linear.cuda("fp8", when=(_refused, _products))
def _(k: Launcher, input: Array, data: Array, scales: Array, bias: Array | None, residual: Array | None) -> Array:
    out = k.empty((*input.shape[:-1], len(data)), input.dtype)
    k.scaled_product(encode(k, input), (k.contiguous(data), scales), out=out, bias=bias, plus=residual)
    return out


@fp8_linear.cuda_vjp("fp8", "input", when=(_refused, _products))
def _(k: Launcher, g: Array, data: Array, scales: Array, targets: GradTargets) -> Array:
    return fp8_product_to(k, g, data, scales, targets["input"])


def fp8_product_to(
    k: Launcher,
    g: Array,
    data: Array,
    scales: Array,
    target: GradTarget,
    value: str = "x",
    other: Array | None = None,
) -> Array:
    """g @ weight by a product of 8 bits, as the gradient at `target`.

    `value` and `other`, as in `encode`, replace g by an expression over it.

    Args:
        k: launches kernels.
        g: (..., out).
        data: e4m3, uint8 (out, in).
        scales: uint32 (out,).
        target: where the gradient goes.
        value, other: as in `encode`.

    Returns:
        (..., in).
    """
    if target.addend is not None and target.addend.dtype != g.dtype:
        return target.addend + fp8_product_to(k, g, data, scales, ALLOCATE, value, other)
    shape = (*g.shape[:-1], data.shape[1])
    buffer = target.buffer
    made = buffer if buffer is not None and buffer.flags.c_contiguous else k.empty(shape, g.dtype)
    columns, ones = transposed(k, k.contiguous(data)), k.ones[: data.shape[1]]
    k.scaled_product(encode(k, g, scales, value, other), (columns, ones), out=made, plus=target.addend)
    return made
