"""Weights of 4 bits as bitsandbytes defines NF4 (QLoRA, arXiv 2305.14314, section 3): doubly quantized blocks of 64.

A weight's elements, row after row, make blocks. Each element is one of 16 numbers, times the largest magnitude of its
block. The magnitudes, less their mean, are one of 256 numbers each, times the largest of 256 of them. So a weight takes
4 + 8 / 64 + 32 / (64 * 256) bits. Numbers are rounded to the nearest of a map; halfway, to the lower.

Magnitudes of magnitudes, and the mean, are stored as uint32, the bits of a float32. So they have no say in the dtype of
a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ....errors import ShapeError
from ...arguments import Arguments
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, as_dtype, bfloat16, compute_dtype, float32, uint8, uint32
from ...namespace import NUMPY, Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from ..common.dims import Shape, at_least

BLOCK: Final = 64
"""Elements that share a magnitude."""
NESTED_BLOCK: Final = 256
"""Magnitudes that share one."""
_LEAST: Final = np.float32(2.0**-126)  # a block's magnitude is at least this where it is divided by
_HEADER, _THREADS, _PACKET = "ops/linear/nf4.cuh", 256, 8  # as in that header

NORMAL: Final = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The numbers of 4 bits: quantiles of the normal distribution, of both signs, and 0."""


def _dynamic() -> np.ndarray[Any, Any]:
    """Returns the numbers of 8 bits (arXiv 1511.04561): a sign, an exponent of 10 in unary, and what bits are left."""
    found = [np.float32(0), np.float32(1)]
    low, high = np.float32(0.1), np.float32(1)
    for exponent in range(7):
        count = 2**exponent
        step, i = float((high - low) / np.float32(count)), np.arange(count + 1)
        ends = np.where(i < (count + 1) // 2, low + step * i, high - step * (count - i)).astype(np.float32)
        means = np.float32(10.0 ** (exponent - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        found += [*means, *-means]
    return np.sort(np.array(found, np.float32))


DYNAMIC: Final = _dynamic()
"""The numbers of 8 bits, of which magnitudes are."""


def _middles(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the points halfway between neighbours, in fp32."""
    made: np.ndarray[Any, Any] = (numbers[1:] + numbers[:-1]) / np.float32(2)
    return made


@dataclass(frozen=True, slots=True)
class Nf4Parts(Arguments):
    """A tensor in NF4, as `nf4_quantize` makes it."""

    data: Array
    absmax: Array
    nested: Array
    offset: Array

    def shape_problem(self, shape: Shape) -> str:
        """Returns what is wrong with them for a tensor of this shape; "" if they fit."""
        count = math.prod(shape)
        blocks = -(-count // BLOCK)
        wanted = (-(-count // 2),), (blocks,), (-(-blocks // NESTED_BLOCK),), (1,)
        parts = self.data, self.absmax, self.nested, self.offset
        found = tuple(tuple(part.shape) for part in parts)
        if found != wanted:
            return f"expected parts of shapes {wanted} for a weight of shape {tuple(shape)}, got {found}"
        dtypes = tuple(part.dtype for part in parts)
        return "" if dtypes == (uint8, uint8, uint32, uint32) else f"expected bytes and factors as uint32, got {dtypes}"


@primitive(multiple=True)
def nf4_quantize(xp: Namespace, input: Array) -> tuple[Array, Array, Array, Array]:
    """input (...) in NF4: two elements a byte, magnitudes in 8 bits, their own magnitudes, and their mean

    Returns:
        data, uint8 (elements / 2,), the first of two elements in the upper half; absmax, uint8 (blocks,); nested,
        uint32 (blocks / 256,); offset, uint32 (1,): sizes rounded up.
    """
    at_least(1, input.shape, "nf4_quantize")
    codes, largest = _coded(xp, input.astype(float32).reshape(-1), BLOCK, NORMAL)
    if len(codes) % 2:
        codes = xp.concatenate([codes, xp.zeros((1,), uint8)])
    data = codes[::2] * uint8.type(16) + codes[1::2]
    mean = xp.sum(largest, dtype=np.float64) / max(1, len(largest))
    offset = xp.asarray(mean).astype(float32).reshape(1)
    absmax, nested = _coded(xp, largest - offset, NESTED_BLOCK, DYNAMIC)
    return data, absmax, nested.view(uint32), offset.view(uint32)


def _coded(xp: Namespace, x: Array, block: int, numbers: np.ndarray[Any, Any]) -> tuple[Array, Array]:
    """Of x (n,), each element's place among `numbers`, uint8, and each block's largest magnitude, fp32."""
    blocks = -(-len(x) // block)
    whole = xp.zeros((blocks * block,), float32)
    whole[: len(x)] = x
    rows = whole.reshape(blocks, block)
    largest = xp.max(xp.abs(rows), axis=1) if blocks else xp.zeros((0,), float32)
    scaled = rows * (np.float32(1) / xp.maximum(largest, _LEAST))[:, None]
    places = xp.searchsorted(xp.asarray(_middles(numbers)), scaled.reshape(-1)[: len(x)])
    return places.astype(uint8), largest


nf4_quantize.non_differentiable("input")
nf4_quantize.samples(sample((3, 64)), sample((2, 3, 5)), sample((0, 4)))
nf4_quantize.perf_samples(sample((80, 640)), sample((3, 5504)))
nf4_quantize.errors(ErrorSample(sample(()), ShapeError, "at least 1 dim"))


@primitive(data_movement=True)
def nf4_dequantize(
    xp: Namespace, data: Array, absmax: Array, nested: Array, offset: Array, shape: Shape, dtype: DType
) -> Array:
    """The numbers that `nf4_quantize` stored; returns them of this shape, in dtype

    Args:
        data: uint8 (elements / 2,).
        absmax: uint8 (blocks,).
        nested: uint32 (blocks / 256,).
        offset: uint32 (1,).
        shape: the shape of the numbers before they were stored.

    Raises:
        ShapeError: the parts are not those of a tensor of this shape.
    """
    problem = Nf4Parts(data, absmax, nested, offset).shape_problem(shape)
    if problem:
        raise ShapeError(f"nf4_dequantize: {problem}")
    dtype, count = as_dtype(dtype), math.prod(shape)
    outer = xp.repeat(nested.view(float32), NESTED_BLOCK)[: len(absmax)]
    largest = xp.asarray(DYNAMIC)[absmax] * outer + offset.view(float32)
    codes = xp.stack([data // uint8.type(16), data % uint8.type(16)], 1).reshape(-1)[:count]
    made = xp.asarray(NORMAL)[codes] * xp.repeat(largest, BLOCK)[:count]
    return made.reshape(shape).astype(compute_dtype(dtype)).astype(dtype)


def stored(*shape: int) -> tuple[Any, ...]:
    """Returns a normally distributed tensor in NF4, for samples."""
    numbers = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    codes, largest = _coded(NUMPY, numbers.reshape(-1), BLOCK, NORMAL)
    padded = np.concatenate([codes, np.zeros(len(codes) % 2, np.uint8)])
    offset = largest.mean(dtype=np.float64).astype(np.float32).reshape(1)
    absmax, nested = _coded(NUMPY, largest - offset, NESTED_BLOCK, DYNAMIC)
    return padded[::2] * np.uint8(16) + padded[1::2], absmax, nested.view(np.uint32), offset.view(np.uint32)


nf4_dequantize.non_differentiable("data", "absmax", "nested", "offset")
nf4_dequantize.samples(
    lambda: (
        sample(*stored(5, 64), (5, 64), np.dtype(np.float64)),
        sample(*stored(3, 7), (3, 7), np.dtype(np.float64)),
    )
)
nf4_dequantize.perf_samples(
    lambda: (
        sample(*stored(80, 640), (80, 640), bfloat16),
        sample(*stored(300, 128), (300, 128), bfloat16),
    )
)


def _nf4_dequantize_errors() -> Iterator[ErrorSample]:
    data, *rest = stored(4, 64)
    yield ErrorSample(sample(data[:3], *rest, (4, 64), float32), ShapeError, r"expected parts of shapes \(\(128,\)")
    yield ErrorSample(sample(data, *rest, (4, 65), float32), ShapeError, r"a weight of shape \(4, 65\)")


nf4_dequantize.errors(_nf4_dequantize_errors)


# ---- kernels -----------------------------------------------------------------------------------------------


def _table(name: str, numbers: np.ndarray[Any, Any]) -> str:
    """Numbers as a constant of a kernel."""
    return f"__device__ const float {name}[] = {{{', '.join(f'{float(n)!r}f' for n in numbers)}}};\n"


_TABLES = "".join(
    _table(*pair)
    for pair in (
        ("NORMAL", NORMAL),
        ("NORMAL_MIDDLES", _middles(NORMAL)),
        ("DYNAMIC", DYNAMIC),
        ("DYNAMIC_MIDDLES", _middles(DYNAMIC)),
    )
)


def _whole_blocks(input: Array) -> str:
    if not input.ndim or input.size == 0 or input.size >= 2**31 or input.size % BLOCK:
        return "no whole blocks, or too many"
    return conditions.same(conditions.AT_MOST_FP32, input)


@nf4_quantize.cuda("flame", when=_whole_blocks)
def _(k: Launcher, input: Array) -> tuple[Array, Array, Array, Array]:
    blocks = input.size // BLOCK
    outer = -(-blocks // NESTED_BLOCK)
    data, absmax = k.empty((input.size // 2,), uint8), k.empty((blocks,), uint8)
    largest, nested, offset = (k.empty((n,), float32) for n in (blocks, outer, 1))
    names, n = {"T": input.dtype}, np.int32(blocks)
    x = k.contiguous(input).reshape(-1)
    warps = _THREADS // 32
    k.launch_header(_HEADER, "nf4_encode", names, (-(-blocks // warps),), _THREADS, (x, data, largest, n), _TABLES)
    k.launch_header(_HEADER, "nf4_mean", names, (1,), _THREADS, (largest, offset, n), _TABLES)
    k.launch_header(_HEADER, "nf4_nest", names, (outer,), _THREADS, (largest, offset, absmax, nested, n), _TABLES)
    return data, absmax, nested.view(uint32), offset.view(uint32)


def _whole_packets(parts: Nf4Parts, shape: Shape, dtype: DType) -> str:
    count = math.prod(shape)
    if parts.shape_problem(shape):
        return "arguments that are refused"
    if count == 0 or count >= 2**31 or count % _PACKET:
        return "no whole packets, or too many"
    return "" if as_dtype(dtype) in conditions.AT_MOST_FP32 else f"no kernel for {dtype}"


@nf4_dequantize.cuda("flame", when=_whole_packets)
def _(k: Launcher, parts: Nf4Parts, shape: Shape, dtype: DType) -> Array:
    out = k.empty(shape, as_dtype(dtype))
    packets = out.size // _PACKET
    factors = parts.nested.view(float32), parts.offset.view(float32)
    args = k.contiguous(parts.data), k.contiguous(parts.absmax), *factors, out, np.int32(packets)
    k.launch_header(_HEADER, "nf4_decode", {"T": out.dtype}, (-(-packets // _THREADS),), _THREADS, args, _TABLES)
    return out
