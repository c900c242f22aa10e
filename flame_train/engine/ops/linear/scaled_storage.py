"""Matrices stored in 8 bits with a factor for each row: e4m3 in uint8 (`e4m3.py`), or int8 (`int8.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flame_train.io.convrot import is_group

from ....errors import ShapeError
from ...backend.cuda.codegen.kernel_ir import Operands, Program, Table
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, as_dtype, bfloat16, compute_dtype, float32, int8, uint8, uint32
from ...namespace import NUMPY, Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from ..common.dims import at_least
from . import convrot, e4m3
from . import int8 as whole
from .e4m3 import factors

_STORED = frozenset({uint8, int8})
LONGEST = 1 << 16
"""Elements of a row, which one block keeps in registers; `Launcher.ones` has as many."""


@primitive(multiple=True)
def fp8_quantize(xp: Namespace, input: Array) -> tuple[Array, Array]:
    """input (..., C) in e4m3, uint8, and each row's factor (...), the bits of a float32: data and scales"""
    at_least(1, input.shape, "fp8_quantize")
    return e4m3.encoded(xp, input)


@primitive(multiple=True)
def int8_quantize(xp: Namespace, input: Array, rotated: int = 0) -> tuple[Array, Array]:
    """input (..., C) as whole numbers, int8, and each row's factor (...), the bits of a float32: data and scales

    Args:
        rotated: columns that are rotated together first, see `convrot.py`; 0: none.

    Returns:
        int8 (..., C), and uint32 (...).
    """
    at_least(1, input.shape, "int8_quantize")
    if rotated and not is_group(rotated, input.shape[-1]):
        raise ShapeError(f"int8_quantize: expected a power of 4 that divides the columns, got {rotated}")
    return whole.encoded(xp, convrot.rotated(xp, input, rotated))


for _quantize in (fp8_quantize, int8_quantize):
    _quantize.non_differentiable("input")
    _quantize.samples(sample((3, 16)), sample((2, 3, 5)), sample((0, 4)))
    _quantize.perf_samples(sample((3, 77, 640)), sample((5, 5120)), sample((70, 131)))
    _quantize.errors(ErrorSample(sample(()), ShapeError, "at least 1 dim"))
int8_quantize.samples(sample((3, 16), 16), sample((2, 3, 32), 4))
int8_quantize.perf_samples(*(sample((n, c), g) for n, c, g in ((9, 3072, 256), (70, 320, 64), (33, 48, 16))))
int8_quantize.errors(ErrorSample(sample((3, 24), 16), ShapeError, "a power of 4 that divides the columns, got 16"))


@primitive(data_movement=True)
def scaled_dequantize(xp: Namespace, data: Array, scales: Array, dtype: DType, rotated: int = 0) -> Array:
    """The numbers (..., C) that `fp8_quantize` or `int8_quantize` stored, in dtype

    Args:
        rotated: the columns that were rotated together; they are rotated back.

    Returns:
        (..., C).
    """
    check_stored(data, scales, "scaled_dequantize", rotated)
    dtype = as_dtype(dtype)
    return weight_of(xp, data, scales, compute_dtype(dtype), rotated).astype(dtype)


scaled_dequantize.non_differentiable("data", "scales")


def stored(*shape: int, dtype: DType = uint8) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns data, of `dtype`, and scales of a normally distributed matrix, for samples."""
    matrix = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    return (e4m3 if dtype == uint8 else whole).encoded(NUMPY, matrix)


_BOTH = (uint8, int8)
scaled_dequantize.samples(
    lambda: [
        *(sample(*stored(*n, dtype=d), np.dtype(np.float64)) for d in _BOTH for n in ((5, 16), (2, 3, 5))),
        sample(*stored(5, 16, dtype=int8), np.dtype(np.float64), 16),
    ]
)
scaled_dequantize.perf_samples(
    lambda: [
        *(sample(*stored(77, 640, dtype=d), bfloat16) for d in _BOTH),
        *(sample(*stored(77, 1280, dtype=int8), bfloat16, group) for group in (64, 256)),
    ]
)


def _scaled_dequantize_errors() -> Iterator[ErrorSample]:
    data, scales = stored(5, 16)
    yield ErrorSample(sample(data, scales[:4], float32), ShapeError, r"expected scales of shape \(5,\), got \(4,\)")
    yield ErrorSample(sample(data, scales, float32, 16), ShapeError, "rotated to be 0, or for int8 a power of 4")


scaled_dequantize.errors(_scaled_dequantize_errors)


def belong(data: Array, scales: Array, rotated: int = 0) -> bool:
    """Tells whether these are data and their scales."""
    try:
        check_stored(data, scales, "", rotated)
    except (TypeError, ShapeError):
        return False
    return True


def check_stored(data: Array, scales: Array, op: str, rotated: int = 0) -> None:
    """Raises TypeError or ShapeError unless these are data and their scales; `op` is the name in messages."""
    if data.dtype not in _STORED or scales.dtype != uint32:
        raise TypeError(
            f"{op}: expected data in uint8 or int8, and scales in uint32, got {data.dtype} and {scales.dtype}"
        )
    if not data.ndim or scales.shape != data.shape[:-1]:
        raise ShapeError(f"{op}: expected scales of shape {tuple(data.shape[:-1])}, got {tuple(scales.shape)}")
    convrot.check_group(op, data, rotated)


def weight_of(xp: Namespace, data: Array, scales: Array, dtype: DType, rotated: int = 0) -> Array:
    """Returns the decoded weight, rotated back."""
    made = (e4m3 if data.dtype == uint8 else whole).decoded(xp, data, dtype) * factors(scales, dtype)[..., None]
    return convrot.rotated(xp, made, rotated)


# ---- kernels -----------------------------------------------------------------------------------------------


def _rows_to_encode(input: Array) -> str:
    if input.ndim == 0 or input.size == 0 or input.size >= 2**31:
        return "nothing to encode, or too much"
    if input.shape[-1] > LONGEST:
        return f"rows of {input.shape[-1]} are longer than {LONGEST}"
    return conditions.same(conditions.AT_MOST_FP32, input)


@fp8_quantize.cuda("flame", when=_rows_to_encode)
def _(k: Launcher, input: Array) -> tuple[Array, Array]:
    data, scales = encode(k, input, uint8)
    return data.reshape(input.shape), scales.reshape(input.shape[:-1])


def _groups_to_encode(input: Array, rotated: int) -> str:
    if rotated and (not input.ndim or not is_group(rotated, input.shape[-1])):
        return "arguments that are refused"
    return convrot.unfit(rotated) or _rows_to_encode(input)


@int8_quantize.cuda("flame", when=_groups_to_encode)
def _(k: Launcher, input: Array, rotated: int) -> tuple[Array, Array]:
    data, scales = encode(k, input, int8, rotated=rotated)
    return data.reshape(input.shape), scales.reshape(input.shape[:-1])


_FACTORS = {
    uint8: ("let factor = factor_of(largest)", "let inverse = 1.f / factor"),
    int8: ("let factor = int8_factor(largest)", "let inverse = int8_inverse(largest)"),
}
"""How a row's factor, and what its numbers are multiplied by, follow from its largest magnitude."""


def encode(
    k: Launcher,
    x: Array,
    dtype: DType,
    by: Array | None = None,
    value: str = "x",
    other: Array | None = None,
    rotated: int = 0,
) -> tuple[Array, Array]:
    """Returns data (M, C) and scales (M,) of the expression `value` over the elements of x (..., C) and of `other`.

    With `by` (C,), stored factors, each column is first multiplied by its own. Then columns are rotated.

    Args:
        x: (..., C).
        dtype: the data's: uint8 for e4m3, or int8.
        by: stored factors of the columns, uint32 (C,), or None.
        value: the expression in C, over `x` and `other`.
        other: an array in the shape of x, or None.
        rotated: columns that are rotated together; 0: none.
    """
    rows = {"x": x} if other is None else {"x": x, "other": other}
    tables = {} if by is None else {"by": Table(by.view(float32))}
    taken = f"row y = {value}{'' if by is None else ' * by'}"
    turn, seen = ((f"rotate{rotated} z = y",), "z") if rotated else ((), "y")
    steps = taken, *turn, f"max largest = fabsf({seen})", *_FACTORS[dtype]
    program = Program(steps, (f"{seen} * inverse",), ("factor",))
    data, factor = k.rows(program, Operands(rows, tables), (dtype, float32))
    return data.reshape(-1, x.shape[-1]), factor.view(uint32)


def _stored_to_decode(data: Array, scales: Array, dtype: DType, rotated: int) -> str:
    if not belong(data, scales, rotated):
        return "arguments that are refused"
    if convrot.unfit(rotated) or (rotated and data.shape[-1] > LONGEST):
        return f"rows of {data.shape[-1]} in groups of {rotated} columns"
    if as_dtype(dtype) not in conditions.AT_MOST_FP32:
        return f"no kernel for {dtype}"
    return "nothing to decode, or too much" if data.size == 0 or data.size >= 2**31 else ""


@scaled_dequantize.cuda("flame", when=_stored_to_decode)
def _(k: Launcher, data: Array, scales: Array, dtype: DType, rotated: int) -> Array:
    return decode(k, data, scales, as_dtype(dtype), rotated)


def decode(k: Launcher, data: Array, scales: Array, dtype: DType, rotated: int = 0) -> Array:
    """Returns the numbers that data and scales store, in `dtype`, rotated back."""
    if rotated:
        program = Program(("row y = data * factor", f"rotate{rotated} z = y"), ("z",))
        operands = Operands({"data": data}, columns={"factor": k.contiguous(scales).reshape(-1).view(float32)})
        return k.rows(program, operands, (dtype,))[0]
    factor = scales.view(float32)[..., None]
    return k.elementwise(("data * factor",), {"data": data, "factor": factor}, (dtype,))[0]
