"""Matrix products of a warpgroup (wgmma) as CUDA functions: no header offers these instructions of capability 9.0."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ....errors import DeviceFault
from ...dtype import Array, DType, bfloat16, float16, int8
from ..shapes.array import ShapeArray

_BYTES, _ALIGNMENT = 128, 64

_TYPE: dict[DType, int] = {int8: 0, float16: 6, bfloat16: 9}  # CUtensorMapDataType

_NOT_INTERLEAVED, _PROMOTE_256, _ZEROS_OUTSIDE = 0, 3, 0

_SWIZZLE = {32: 1, 128: 3}  # CUtensorMapSwizzle: by 32 and by 128 bytes, as long as a tile's rows

STRUCT = np.dtype([("words", "u8", _BYTES // 8)])
"""The layout of a tensor map; an array of one, as bytes, is passed by value (`nvrtc.struct`)."""

_OF_NOTHING = np.zeros(1, f"V{_BYTES}")
"""What stands for the map of an array of a described GPU, which has no memory."""


def tensor_map(x: Array, tile: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Describes `x` (..., R, C) with a dense last dim, in tiles (rows, columns), whose rows are 32 or 128 bytes.

    Returns the bytes of a STRUCT.

    Raises DeviceFault if the driver refuses it.
    """
    if isinstance(x, ShapeArray):
        return _OF_NOTHING
    return _encoded(x.data.ptr, x.dtype, x.shape, x.strides[:-1], tile)


@lru_cache(maxsize=8192)  # weights stay at their addresses; a step has a few thousand operands
def _encoded(
    pointer: int, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], tile: tuple[int, int]
) -> np.ndarray[Any, Any]:
    buffer = np.zeros(_BYTES // 8 + _ALIGNMENT // 8, np.uint64)
    first = -buffer.ctypes.data % _ALIGNMENT // 8
    made = buffer[first : first + _BYTES // 8]
    rank, box = len(shape), (*(1,) * (len(shape) - 2), *tile)
    numbers, small = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    status = _encode()(
        made.ctypes.data,
        _TYPE[dtype],
        rank,
        pointer,
        numbers(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(strides)),
        small(*reversed(box)),
        small(*(1,) * rank),
        _NOT_INTERLEAVED,
        _SWIZZLE[tile[1] * dtype.itemsize],
        _PROMOTE_256,
        _ZEROS_OUTSIDE,
    )
    if status:
        raise DeviceFault(f"the driver cannot describe {shape}, dims {strides} bytes apart, in tiles {tile}: {status}")
    return made.view(f"V{_BYTES}")


@cache
def _encode() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, ctypes.c_uint32, *[pointer] * 5, *[number] * 4]
    return function


KIND = {bfloat16: "bf16", float16: "f16"}
"""PTX's names of the floats that warpgroups multiply."""


def warpgroup_product(
    name: str,
    columns: int,
    across: bool,
    dtype: DType,
    held: bool = False,
    overwrite: bool = False,
    turned: bool = False,
) -> str:
    """The text of function `name`: sums (64, columns) = or += a (64, 16) b (16, columns), one wgmma instruction.

    a lies in shared memory as it is or, `turned`, as its transpose, unless it is `held` in registers. The other, b,
    lies there as its transpose or, `across`, as it is. The function's argument `more` says whether to add to the sums;
    a `overwrite` one has none and always overwrites them.

    Args:
        name: the function's.
        columns: of b, a multiple of 8.
        across: whether b lies as it is, not transposed.
        dtype: bf16, fp16, or int8, whose products are 32 deep and sums whole, and where b is not `across`.
        held: whether a is in registers.
        overwrite: whether sums are always overwritten.
        turned: whether a lies transposed.

    Returns:
        The text.
    """
    n, given, whole = columns // 2, 4 if held else 1, dtype == int8
    form = "k32.s32.s8.s8" if whole else f"k16.f32.{KIND[dtype]}.{KIND[dtype]}"
    kind, constraint = ("int", "r") if whole else ("float", "f")
    registers = ", ".join(f"%{i}" for i in range(n))
    sums = ", ".join(f'"{"=" if overwrite else "+"}{constraint}"(sums[{i}])' for i in range(n))
    left = f"{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, %{n + 4}" if held else f"%{n}, %{n + 1}"
    operands = ", ".join(f'"r"(a[{i}])' for i in range(given)) if held else '"l"(a)'
    transposed = f", 1, 1, {int(across)}" if held else f", 1, 1, {int(turned)}, {int(across)}"
    transposed = "" if whole else transposed
    more = ("", "0", "") if overwrite else (", int more = 1", f"%{n + given + 1}", ', "r"(more)')
    return f"""
__device__ __forceinline__ void {name}(
    {kind} (&sums)[{n}], {"const unsigned*" if held else "unsigned long long"} a, unsigned long long b{more[0]}
) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, {more[1]}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}{form} "
      "{{{registers}}}, {left}, p{transposed};\\n}}"
      : {sums} : {operands}, "l"(b){more[2]});
}}
"""
