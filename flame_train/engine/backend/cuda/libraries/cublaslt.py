"""Matrix products through cuBLASLt, called by ctypes with descriptors kept per problem.

CuPy's own products cannot be captured in a CUDA graph; these can. Matrices are row-major for us and
column-major for cuBLASLt, so D = A B is requested as D^T = B^T A^T. Each operand may be transposed by
stride alone.

Where the mode asks for determinism, the algorithm is the first that cuBLASLt's heuristic names. Elsewhere the first
few are timed, once for each problem and card, and the fastest is kept on disk.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import lru_cache, partial
from typing import Any, NamedTuple

from .....errors import DeviceFault, EnvironmentFault
from ....dtype import Array, DType, bfloat16, float16, float32, float64, int8, int32
from ....mode import mode
from ..autotuner import AutotuneCache, Autotuner
from ..launch_hooks import LaunchHooks
from ..nvidia_libraries import load
from ..tuning import tuning_for
from . import cublaslt_abi as abi

_LOG = logging.getLogger(__name__)
_WORKSPACE_BYTES = 32 << 20  # NVIDIA's advice for Hopper
_CANDIDATES = 12  # algorithms that are timed

SUPPORTED = frozenset({float32, float64, float16, bfloat16})


class Gelu(NamedTuple):
    """An epilogue: the result is the tanh-GELU of the product, and the product itself is written to `hidden`.

    With `slope`, for the backward pass, the result is the product times GELU's derivative at `hidden`, which is read.
    `hidden` has the result's shape and dtype, of 16 bits, and the distance between its rows is a multiple of 16 bytes.
    """

    hidden: Array
    derivative: bool = False


class NoAlgorithm(DeviceFault):
    """cuBLASLt has no algorithm for a product of these sizes, dtypes and layouts."""


class _Operand(NamedTuple):
    """One matrix as cuBLASLt sees it: column-major rows x columns, leading dimension, stride between batches."""

    rows: int
    cols: int
    ld: int
    batch_stride: int
    transposed: bool


_Strides = tuple[int, int]
"""The distance between rows and that between matrices, in elements."""


class _Problem(NamedTuple):
    """Everything the choice of an algorithm depends on. A tuple, because one is made and looked up at every product."""

    dtype: DType
    out_dtype: DType
    a: _Operand
    b: _Operand
    out: _Strides
    added: _Strides
    batch: int
    epilogue: int
    hidden_row: int
    """The distance between rows of `Gelu.hidden`, in elements."""
    accumulate: bool
    alignment: int
    """That of all pointers, in bytes."""
    measured: bool
    tf32: bool
    scaling: int
    """cublasLtMatmulMatrixScale_t; 0: no scales."""


class _Plan:
    """The descriptors of one problem in cuBLASLt's order, and its algorithm once that is chosen."""

    __slots__ = ("a", "algorithm", "b", "c", "d", "description", "problem")

    def __init__(self, problem: _Problem, description: int, a: int, b: int, c: int, d: int) -> None:
        self.problem, self.description = problem, description
        self.a, self.b, self.c, self.d = a, b, c, d
        self.algorithm: Any = None


class CublasLt:
    """One handle, one workspace, and the plans made so far. `cache` keeps measured choices between runs."""

    def __init__(self, cupy: Any, stream: Any, cache: AutotuneCache, launch_hooks: LaunchHooks) -> None:
        self._cupy, self._stream, self._cache, self._launch_hooks = cupy, stream, cache, launch_hooks
        self._autotuner = Autotuner(cupy, stream, tuning_for(int(cupy.cuda.Device().compute_capability)))
        self._lib = abi.declare(load("cublasLt"))
        self._version = int(self._lib.cublasLtGetVersion())
        handle = ctypes.c_void_p()
        self._check(self._lib.cublasLtCreate(ctypes.byref(handle)), "create")
        self._handle = handle.value
        self._workspace = cupy.cuda.alloc(_WORKSPACE_BYTES)
        self._plans: dict[_Problem, _Plan] = {}
        self._lock = threading.Lock()

    def product(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        bias: Array | None = None,
        alpha: float = 1.0,
        plus: Array | None = None,
        gelu: Gelu | None = None,
        scales: tuple[Array, Array] | None = None,
        blocks: bool = False,
    ) -> None:
        """out = alpha * a @ b (+ plus) (+ bias along the last dim), or what `gelu` makes of that.

        `a` (M, K) and `b` (K, N), or (batch, M, K) and (batch, K, N). Each with one of its last two strides equal to
        the item size. The rows of `out` and `plus` are dense. `plus` has out's dtype, and may be `out` itself.

        With `scales`, fp32 (M,) and (N,), `a` and `b` are e4m3 numbers in uint8, both dense along K, a multiple of
        16. Each element of the product is scaled by its row's and its column's factor. With `blocks` they are what
        `BlockScales` makes of these. Without `scales` such numbers are multiplied as they are.

        Where `a` and `b` are int8, they are dense along K in the same way. `out` is int32 and the product is exact.
        `alpha` is 1, and there is no other operand.

        Raises NoAlgorithm for problems that cuBLASLt has none for, EnvironmentFault if it is too old for `scales`,
        DeviceFault if it fails.

        Args:
            a: (M, K) or (batch, M, K).
            b: (K, N) or (batch, K, N).
            out: (M, N) or (batch, M, N).
            bias: (N,), or None.
            alpha: the factor of the product.
            plus: an addend of the result's shape, or None.
            gelu: an epilogue, or None.
            scales: factors of rows and columns, fp32 (M,) and (N,), or None.
            blocks: whether scales are tiles of blocks' scales.
        """
        batch = out.shape[0] if out.ndim == 3 else 1
        added = out if plus is None else plus
        pointers = (a.data.ptr, b.data.ptr, out.data.ptr, added.data.ptr)
        problem = _Problem(
            a.dtype,
            out.dtype,
            _operand(a),
            _operand(b),
            _rows(out),
            _rows(added),
            batch,
            *_epilogue(bias, gelu),
            plus is not None,
            16 if all(p % 16 == 0 for p in pointers) else a.itemsize,
            not mode().deterministic,
            a.dtype == float32 and mode().float32_precision == "high",
            0 if scales is None else abi.BLOCKS_OF_32 if blocks else abi.A_FACTOR_A_ROW,
        )
        scale = _scales(a.dtype, alpha, plus is not None)
        with self._lock:
            plan = self._plans.get(problem) or self._make(problem, out.shape)
            self._point(plan.description, bias, gelu, scales)
            if plan.algorithm is None:
                plan.algorithm = self._choose(plan, pointers, scale, out)
            if self._launch_hooks.should_launch("matrix product"):
                self._launch(plan, plan.algorithm, pointers, scale)

    def _point(
        self, description: int, bias: Array | None, gelu: Gelu | None, scales: tuple[Array, Array] | None
    ) -> None:
        """Writes the addresses of this call's further operands into a plan, which is shared by calls of its problem."""
        if bias is not None:
            self._set(description, abi.BIAS_POINTER, ctypes.c_void_p(bias.data.ptr))
        if scales is not None:
            self._set(description, abi.B_SCALES, ctypes.c_void_p(scales[0].data.ptr))
            self._set(description, abi.A_SCALES, ctypes.c_void_p(scales[1].data.ptr))
        if gelu is not None:
            self._set(description, abi.AUX_POINTER, ctypes.c_void_p(gelu.hidden.data.ptr))

    def _launch(self, plan: _Plan, algorithm: Any, pointers: tuple[int, ...], scale: ctypes.Array[Any]) -> None:
        a, b, out, added = pointers
        alpha = ctypes.addressof(scale)
        beta = alpha + ctypes.sizeof(scale) // 2
        status = self._lib.cublasLtMatmul(
            self._handle,
            plan.description,
            alpha,
            b,
            plan.b,
            a,
            plan.a,
            beta,
            added,
            plan.c,
            out,
            plan.d,
            algorithm,
            self._workspace.ptr,
            _WORKSPACE_BYTES,
            self._stream.ptr,
        )
        if status:
            self._check(status, f"matmul, {plan.problem}")

    def _make(self, p: _Problem, out_shape: tuple[int, ...]) -> _Plan:
        """Returns a new plan, without an algorithm; it is kept for later calls."""
        lib = self._lib
        wide = _scale_dtype(p.dtype)
        computed = {
            float64: abi.COMPUTE_64F,
            int32: abi.COMPUTE_32I,
            float32: abi.COMPUTE_TF32 if p.tf32 else abi.COMPUTE_32F,
        }
        description = self._new(lib.cublasLtMatmulDescCreate, computed[wide], abi.TYPE[wide])
        # cuBLASLt's A is our b and its B is our a: the product is requested transposed.
        self._set(description, abi.TRANSA, ctypes.c_int32(p.b.transposed))
        self._set(description, abi.TRANSB, ctypes.c_int32(p.a.transposed))
        if p.epilogue:
            self._set(description, abi.EPILOGUE, ctypes.c_uint32(p.epilogue))
        if p.epilogue & abi.BIAS:
            self._set(description, abi.BIAS_TYPE, ctypes.c_int32(abi.TYPE[p.out_dtype]))
        if p.scaling:
            self._scaled(description, p.out_dtype, p.scaling)
        if p.hidden_row:
            self._set(description, abi.AUX_ROW, ctypes.c_int64(p.hidden_row))
        a = self._layout(p.dtype, p.a.rows, p.a.cols, p.a.ld, p.batch, p.a.batch_stride)
        b = self._layout(p.dtype, p.b.rows, p.b.cols, p.b.ld, p.batch, p.b.batch_stride)
        rows, cols = out_shape[-2:]
        c, d = (self._layout(p.out_dtype, cols, rows, ld, p.batch, step) for ld, step in (p.added, p.out))
        self._plans[p] = plan = _Plan(p, description, a, b, c, d)
        return plan

    def _scaled(self, description: int, out_dtype: DType, scaling: int) -> None:
        """Asks for a scale for each row or block, and for bf16 results for fast accumulation.

        That keeps fewer bits of a sum, which matters less than the rounding to bf16.
        """
        if self._version < abi.SCALED_SINCE:
            raise EnvironmentFault(
                f"products in fp8 need cuBLAS 12.9 or newer, found {self._version}; install it, "
                'or use model.arithmetic = "bf16"'
            )
        self._set(description, abi.A_SCALED, ctypes.c_int32(scaling))
        self._set(description, abi.B_SCALED, ctypes.c_int32(scaling))
        self._set(description, abi.QUICK_SUMS, ctypes.c_int8(out_dtype == bfloat16))

    def _layout(self, dtype: DType, rows: int, cols: int, ld: int, batch: int, stride: int) -> int:
        layout = self._new(self._lib.cublasLtMatrixLayoutCreate, abi.TYPE[dtype], rows, cols, ld)
        if batch > 1:
            count, step = ctypes.c_int32(batch), ctypes.c_int64(stride)
            setter = self._lib.cublasLtMatrixLayoutSetAttribute
            self._check(setter(layout, abi.BATCH_COUNT, ctypes.byref(count), 4), "batch count")
            self._check(setter(layout, abi.BATCH_STRIDE, ctypes.byref(step), 8), "batch stride")
        return layout

    # ---- the algorithm -------------------------------------------------------------------------------

    def _choose(self, plan: _Plan, pointers: tuple[int, ...], scale: ctypes.Array[Any], out: Array) -> Any:
        """The heuristic's first, which depends on problem, library and card alone; or the fastest, if it may be timed.

        A problem first met during a capture, in which nothing runs, gets the heuristic's first. Timing writes into
        memory of its own.
        """
        if not plan.problem.measured or mode().capturing:
            return self._advised(plan, 1)[0]
        question = f"cuBLASLt {self._version} {plan.problem}"
        kept = self._restored(plan, self._cache.get(question))
        if kept is not None:
            return kept
        found = self._advised(plan, _CANDIDATES)
        a, b, target, added = pointers
        scratch = self._cupy.empty(_extent(out), out.dtype)
        there = scratch.data.ptr
        operands = (a, b, there, there if added == target else added)
        best = found[self._autotuner.fastest([partial(self._launch, plan, way, operands, scale) for way in found])]
        self._cache.put(question, bytes(best))
        return best

    def _advised(self, plan: _Plan, most: int) -> list[Any]:
        """Returns the heuristic's choices, best first, at most `most`. Raises NoAlgorithm if there are none."""
        preference = self._new(self._lib.cublasLtMatmulPreferenceCreate)
        setter = self._lib.cublasLtMatmulPreferenceSetAttribute
        limit, reductions = ctypes.c_uint64(_WORKSPACE_BYTES), ctypes.c_uint32(abi.IN_FULL)
        alignment = ctypes.c_uint32(plan.problem.alignment)
        self._check(setter(preference, abi.MAX_WORKSPACE, ctypes.byref(limit), 8), "workspace")
        self._check(setter(preference, abi.REDUCTIONS, ctypes.byref(reductions), 4), "reductions")
        for attribute in abi.MIN_ALIGNMENT:
            self._check(setter(preference, attribute, ctypes.byref(alignment), 4), "alignment")
        results = (abi.Result * most)()
        count = ctypes.c_int()
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            plan.description,
            plan.b,
            plan.a,
            plan.c,
            plan.d,
            preference,
            most,
            results,
            ctypes.byref(count),
        )
        found = [r.algorithm for r in results[: count.value] if r.status == 0]
        if status == abi.NOT_SUPPORTED or not (status or found):
            raise NoAlgorithm(f"cuBLASLt has no algorithm for {plan.problem}")
        self._check(status, f"heuristic for {plan.problem}")
        return found

    def _restored(self, plan: _Plan, kept: bytes | None) -> Any:
        """Returns an algorithm kept on disk, if the library can still run it on this problem."""
        if kept is None:
            return None
        if len(kept) == ctypes.sizeof(abi.Algorithm):
            algorithm, result = abi.Algorithm.from_buffer_copy(kept), abi.Result()
            status = self._lib.cublasLtMatmulAlgoCheck(
                self._handle, plan.description, plan.b, plan.a, plan.c, plan.d, algorithm, ctypes.byref(result)
            )
            if status == 0 and result.workspace <= _WORKSPACE_BYTES:
                return algorithm
        _LOG.warning("cuBLASLt %d refused a matrix product's kept algorithm; another is chosen", self._version)
        return None

    def _new(self, create: Any, *args: int) -> int:
        made = ctypes.c_void_p()
        self._check(create(ctypes.byref(made), *args), create.__name__)
        assert made.value is not None
        return made.value

    def _set(self, description: int, attribute: int, value: Any) -> None:
        status = self._lib.cublasLtMatmulDescSetAttribute(
            description, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )
        self._check(status, f"attribute {attribute}")

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise DeviceFault(f"cuBLASLt failed with status {status}: {what}")


def _scale_dtype(dtype: DType) -> DType:
    """That of alpha and beta, for operands of `dtype`."""
    return float64 if dtype == float64 else int32 if dtype == int8 else float32


def _scales(dtype: DType, alpha: float, adds: bool) -> ctypes.Array[Any]:
    """Returns (alpha, beta) for operands of `dtype`."""
    wide = _scale_dtype(dtype)
    kind = int if wide == int32 else float
    made: ctypes.Array[Any] = abi.SCALES[wide](kind(alpha), kind(adds))
    return made


def _epilogue(bias: Array | None, gelu: Gelu | None) -> tuple[int, int]:
    """The code of the epilogue, and the distance between the rows of `gelu.hidden` in elements, 0 without one."""
    if gelu is None:
        return (0 if bias is None else abi.BIAS), 0
    kind = abi.GELU_SLOPE if gelu.derivative else abi.GELU
    return kind | (0 if bias is None else abi.BIAS), gelu.hidden.strides[-2] // gelu.hidden.itemsize


def _operand(x: Array) -> _Operand:
    """`x` (..., R, C) for cuBLASLt: row-major it is a column-major (C, R) matrix; column-major it is transposed."""
    return _lying(x.shape, x.strides, x.itemsize)


@lru_cache(maxsize=4096)  # a step makes thousands of products, of a few hundred kinds of operand
def _lying(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> _Operand:
    rows, cols = shape[-2:]
    batch_stride = strides[0] // item if len(shape) == 3 else 0
    down, across = strides[-2] // item, strides[-1] // item
    if across == 1 or cols == 1:
        return _Operand(cols, rows, max(down, cols), batch_stride, False)
    return _Operand(rows, cols, max(across, rows), batch_stride, True)


def _rows(x: Array) -> _Strides:
    """Returns the distances between rows and between matrices of a result, in elements."""
    return x.strides[-2] // x.itemsize, x.strides[0] // x.itemsize if x.ndim == 3 else 0


def _extent(x: Array) -> int:
    """Elements from the first of `x` to its last."""
    return 1 + sum((n - 1) * (s // x.itemsize) for n, s in zip(x.shape, x.strides, strict=True))
