"""cuBLASLt's C interface (cublasLt.h): its codes, structures and signatures."""

from __future__ import annotations

import ctypes
from typing import Any

from ....dtype import DType, bfloat16, float16, float32, float64, int8, int32, uint8

TYPE = {float32: 0, float64: 1, float16: 2, int8: 3, int32: 10, bfloat16: 14, uint8: 28}  # cudaDataType_t
"""uint8 holds e4m3."""
COMPUTE_32F, COMPUTE_64F, COMPUTE_TF32 = 68, 70, 77  # cublasComputeType_t; all accumulate in full precision
COMPUTE_32I = 72  # of the same, exact
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 4, 7, 8, 26  # cublasLtMatmulDescAttributes_t
AUX_POINTER, AUX_ROW = 11, 12  # of the same: the auxiliary array that an epilogue reads or writes
A_SCALES, B_SCALES, QUICK_SUMS, A_SCALED, B_SCALED = 17, 18, 25, 31, 32  # of the same: for 8-bit operands
BLOCKS_OF_32, A_FACTOR_A_ROW = 2, 3  # cublasLtMatmulMatrixScale_t
SCALED_SINCE = 120900  # the first version of cuBLASLt with a scale for each row
NOT_SUPPORTED = 15  # cublasStatus_t
BATCH_COUNT, BATCH_STRIDE = 5, 6  # cublasLtMatrixLayoutAttribute_t
MAX_WORKSPACE, REDUCTIONS, MIN_ALIGNMENT = 1, 3, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
IN_FULL = 2  # cublasLtReductionScheme_t: parts of a sum are added in the accumulator's precision
BIAS, GELU, GELU_SLOPE = 4, 160, 192  # cublasLtEpilogue_t; a bias may be combined with GELU

SCALES: dict[DType, Any] = {float32: ctypes.c_float * 2, float64: ctypes.c_double * 2, int32: ctypes.c_int32 * 2}
"""(alpha, beta) of D = alpha A B + beta C, by their dtype."""


Algorithm = ctypes.c_uint64 * 8
"""cublasLtMatmulAlgo_t."""


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int32),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int32 * 4),
    )


def declare(lib: ctypes.CDLL) -> Any:
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    u64, i64 = ctypes.c_uint64, ctypes.c_int64
    lib.cublasLtGetVersion.restype = size
    lib.cublasLtCreate.argtypes = [pointer]
    lib.cublasLtMatmulDescCreate.argtypes = [pointer, integer, integer]
    lib.cublasLtMatmulDescSetAttribute.argtypes = [pointer, integer, pointer, size]
    lib.cublasLtMatrixLayoutCreate.argtypes = [pointer, integer, u64, u64, i64]
    lib.cublasLtMatrixLayoutSetAttribute.argtypes = [pointer, integer, pointer, size]
    lib.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
    lib.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, integer, pointer, size]
    lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, integer, pointer, pointer]
    lib.cublasLtMatmulAlgoCheck.argtypes = [pointer] * 8
    lib.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    return lib
