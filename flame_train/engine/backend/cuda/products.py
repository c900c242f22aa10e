"""Matrix products as kernel launchers call them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from ...dtype import Array, DType, float32, float64, int8, int32, uint32
from .arrays import Arrays
from .autotuner import AutotuneCache, default_folder
from .block_scales import BLOCK, SINCE, BlockScales, lacking
from .codegen.kernel_ir import Operands as Rowwise
from .codegen.kernel_ir import Program, Table
from .codegen.rows import Rows
from .cubin import Cubins
from .dual_gemm import DualGemm, Operands
from .launch_hooks import LaunchHooks
from .libraries.cublaslt import CublasLt, Gelu, NoAlgorithm
from .nvidia_libraries import driver_version

ScaledRows = tuple[Array, Array | None]
"""Rows (R, C) in e4m3 or int8, and the factor of each (R,); None: those of int8 are 1."""

LowRank = tuple[Array, Array, int]
"""a2 (M, parts R), b2 (R, N), and how many equal parts of N columns have columns of a2 of their own."""

_LOG = logging.getLogger(__name__)

_SUMS_BYTES = 32 << 20
"""Of a product's sums that lie in memory at once: what the cache of a large card keeps until they are read."""
_ROWS_OF_SUMS = 256
"""Their rows come in multiples of this, as many as a few tiles of a product have."""


class Products(Arrays):
    """Products by cuBLASLt and by the kernels of dual_gemm.cuh, whichever is faster."""

    rows: Rows
    _stream: Any
    launch_hooks: LaunchHooks
    multiprocessors: int
    compute_capability: int
    block_scales: BlockScales
    _biased_apart: set[tuple[int, ...]]
    """Shapes of 8-bit products without an algorithm for a bias."""

    @cached_property
    def _cache(self) -> AutotuneCache:
        return AutotuneCache(default_folder(), _place(self.xp))

    @cached_property
    def _cubins(self) -> Cubins:
        return Cubins(self.xp, self._cache)

    @cached_property
    def cublaslt(self) -> CublasLt:
        """Loaded on first use."""
        return CublasLt(self.xp, self._stream, self._cache, self.launch_hooks)

    @cached_property
    def dual_gemms(self) -> DualGemm:
        """Made on first use."""
        return DualGemm(
            self.xp,
            self._stream,
            self._cache,
            self.launch_hooks,
            self._cubins,
            self.multiprocessors,
            self.compute_capability,
        )

    @cached_property
    def scales_blocks(self) -> bool:
        """Whether products of e4m3 are scaled by blocks; of two ways on compute capability 12 the faster one."""
        if self.compute_capability < SINCE:
            return False
        problem = lacking(self.xp, self._by_blocks, self._from_sums)
        if problem:
            _LOG.warning(
                "products in fp8 scaled by blocks are not used: %s; plain ones are, which take longer here", problem
            )
        return not problem

    def matmul(
        self,
        a: Array,
        b: Array,
        *,
        bias: Array | None = None,
        out: Array | None = None,
        alpha: float = 1.0,
        plus: Array | None = None,
        out_dtype: DType | None = None,
        gelu: Gelu | None = None,
    ) -> Array:
        """Returns alpha * a @ b (+ bias) (+ plus), for a (..., M, K) and b (K, N) or (..., K, N); `plus` may be `out`.

        With `gelu`, for b (K, N) and with its `hidden` (rows, N), what that makes of the product.

        Args:
            a: (..., M, K).
            b: (K, N) or (..., K, N).
            bias: (N,), or None.
            out: an array for the result, or None.
            alpha: the factor of the product.
            plus: an addend of the result's shape, or None.
            out_dtype: the result's dtype; None: a's.
            gelu: an epilogue, or None.

        Returns:
            (..., M, N).
        """
        a, b = self._plain(a), self._plain(b)
        if b.ndim == 2 and a.ndim > 2:
            a2 = self.mergeable_rows(a).reshape(math.prod(a.shape[:-1]), a.shape[-1])
            flat_out, flat_plus = (None if x is None else x.reshape(a2.shape[0], b.shape[1]) for x in (out, plus))
            flat = self.matmul(
                a2, b, bias=bias, out=flat_out, alpha=alpha, plus=flat_plus, out_dtype=out_dtype, gelu=gelu
            )
            return flat.reshape(*a.shape[:-1], b.shape[1])
        lead = self.xp.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim > 2 or b.ndim > 2 else ()
        if out is None:
            out = self.empty((*lead, a.shape[-2], b.shape[-1]), out_dtype or a.dtype)
        if bias is not None and a.dtype == float64:
            # cuBLASLt has no fp64 product with a bias.
            self.matmul(a, b, out=out, alpha=alpha, plus=plus)
            out += bias
            return out
        if 0 in (*out.shape, a.shape[-1]):
            out[...] = 0 if plus is None else plus
            if bias is not None:
                out += bias
            return out
        a3, b3, o3 = (_three(self.xp, x, lead) for x in (a, b, out))
        p3 = o3 if plus is out else None if plus is None else _three(self.xp, self.contiguous(plus), lead)
        self.cublaslt.product(a3, b3, o3, bias=bias, alpha=alpha, plus=p3, gelu=gelu)
        return out

    def scaled_product(
        self,
        a: ScaledRows,
        b: ScaledRows,
        *,
        out: Array,
        bias: Array | None = None,
        plus: Array | None = None,
        rotated: int = 0,
        low: LowRank | None = None,
    ) -> None:
        """Returns out (..., N) = a @ b^T (+ bias) (+ plus) (+ low), for a (M, K) and b (N, K).

        See ops/linear/scaled.py. M is the number of rows of `out`, which is dense; `plus` may be `out`.

        Args:
            a: (M, K).
            b: (N, K).
            out: (..., N), with M rows.
            bias: (N,), or None.
            plus: an addend of the result's shape, or None.
            rotated: a @ b^T's columns that are rotated together, of int8 without a bias; 0: none.
            low: a product of two thin matrices in out's dtype, which is added, or None.
        """
        (rows, row_scales), (columns, column_scales) = a, b
        flat = out.reshape(-1, len(columns))
        added = flat if plus is out else None if plus is None else self.contiguous(plus).reshape(flat.shape)
        by, across = (None if s is None else s.view(float32) for s in (row_scales, column_scales))
        hidden, up, parts = low or (None, None, 1)
        x = Operands(rows, columns.T, hidden, up, flat, parts, bias, added, factors=(by, across), rotated=rotated)
        if rows.dtype == int8:
            if not self.dual_gemms.made(x, self._from_sums):
                self._from_sums(x)
        elif self.compute_capability < SINCE:
            self._scaled(x, (row_scales, column_scales))
        elif self.scales_blocks and not rows.shape[1] % BLOCK:
            self._by_blocks(x)
        else:
            self._from_sums(x)

    def _by_blocks(self, x: Operands) -> None:
        """Computes a product of e4m3 whose scales stand for blocks, all of a row's alike."""
        assert x.factors is not None
        scales = [self.block_scales(f.view(uint32), x.a.shape[1]) for f in x.factors if f is not None]
        self._scaled(x, (scales[0], scales[1]), blocks=True)

    def _scaled(self, x: Operands, scales: tuple[Array, Array], blocks: bool = False) -> None:
        """Computes a product of e4m3 that cuBLASLt scales: by a factor a row, or by `blocks`."""
        product = partial(self.cublaslt.product, x.a, x.b, x.out, plus=x.plus, scales=scales, blocks=blocks)
        self._with_bias(product, (*x.a.shape, x.out.shape[1]), x.out, x.bias)
        self._add_low_rank(x.out, x.a2, x.b2, x.parts)

    def _with_bias(self, product: Callable[..., None], shape: tuple[int, ...], out: Array, bias: Array | None) -> None:
        """Makes a product of 8 bits of this shape, and adds `bias`, if there is one, in it or after it."""
        if bias is not None and shape not in self._biased_apart:
            try:
                return product(bias=bias)
            except NoAlgorithm:  # such as long sums of few rows, which are split
                self._biased_apart.add(shape)
        product()
        if bias is not None:
            self.elementwise(("x + bias",), {"x": out, "bias": bias}, (out.dtype,), out=(out,))

    def _from_sums(self, x: Operands) -> None:
        """Computes a product of 8 bits by parts of the rows: sums in 32 bits, then factors and the rest in one pass."""
        assert x.factors is not None
        by, across = x.factors[0], {} if x.factors[1] is None else {"across": x.factors[1]}
        further = {} if x.bias is None else {"bias": x.bias}
        scaled, (rows, columns) = " * ".join(["(float)sums", "by", *across]), x.out.shape
        value = " + ".join([scaled, *further, *([] if x.plus is None else ["plus"])])
        step = max(_ROWS_OF_SUMS, _SUMS_BYTES // (4 * columns) // _ROWS_OF_SUMS * _ROWS_OF_SUMS)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            sums = self.empty(x.out[part].shape, int32 if x.a.dtype == int8 else float32)
            self.cublaslt.product(x.a[part], x.b, sums)
            given = {"sums": sums} | ({} if x.plus is None else {"plus": x.plus[part]})
            out = (x.out[part],)
            if x.rotated:
                steps = f"row y = {scaled}", f"rotate{x.rotated} z = y"
                program = Program(steps, ("z" if x.plus is None else "z + plus",))
                tables = {name: Table(each) for name, each in across.items()}
                self.rows(program, Rowwise(given, tables, {"by": by[part]}), (x.out.dtype,), out=out)
            else:
                operands = given | {"by": by[part, None], **across, **further}
                self.elementwise((value,), operands, (x.out.dtype,), out=out)
        self._add_low_rank(x.out, x.a2, x.b2, x.parts)

    def dual_gemm(
        self,
        a: Array,
        b: Array,
        a2: Array,
        b2: Array,
        *,
        parts: int = 1,
        bias: Array | None = None,
        plus: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """a @ b + a2 @ b2 (+ bias) (+ plus), for a (..., K), b (K, N), a2 (M, parts R), b2 (R, N); `plus` may be `out`.

        M is the number of rows of a. The N columns are `parts` equal parts; the i-th uses columns i R to (i + 1) R of
        a2.

        Args:
            a: (..., K).
            b: (K, N).
            a2: (M, parts R).
            b2: (R, N).
            parts: equal parts of the columns.
            bias: (N,), or None.
            plus: an addend of the result's shape, or None.
            out: an array for the result, or None.

        Returns:
            (..., N).
        """
        out, flat, added = self._target(a, b.shape[1], plus, out)
        x = Operands(self.mergeable_rows(a).reshape(-1, a.shape[-1]), b, a2, b2, flat, parts, bias, added)
        if not self.dual_gemms.made(x, self._separately):
            self._separately(x)
        return out

    def lora_gemm(
        self,
        a: Array,
        b: Array,
        thin: Array,
        b2: Array,
        scale: float,
        *,
        parts: int = 1,
        splits: int = 1,
        bias: Array | None = None,
        plus: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, Array]:
        """`dual_gemm` with a2 = scale * a @ thin, for thin (K, parts R); returns the result and a2 (M, parts R).

        With `splits` the columns of a, and the rows of thin (K, R), are that many equal parts. The product of the i-th
        ones is columns i R to (i + 1) R of a2 (M, splits R), and b2 is (splits R, N).

        Args:
            a: (..., K).
            b: (K, N).
            thin: (K, parts R), or (K, R) with `splits`.
            b2: (R, N), or (splits R, N).
            scale: the factor of a2.
            parts: equal parts of the columns of the result.
            splits: equal parts of a's columns.
            bias: (N,), or None.
            plus: an addend of the result's shape, or None.
            out: an array for the result, or None.

        Returns:
            (..., N), and a2.
        """
        a = self.mergeable_rows(a)
        rows = a.reshape(-1, a.shape[-1])
        hidden = self.empty((len(rows), thin.shape[1] * splits), a.dtype)
        out, flat, added = self._target(a, b.shape[1], plus, out)
        x = Operands(rows, b, hidden, b2, flat, parts, bias, added, thin, scale, splits)
        if not self.dual_gemms.made(x, self._thin_first):
            self._thin_first(x)
        return out, hidden

    def _target(self, a: Array, n: int, plus: Array | None, out: Array | None) -> tuple[Array, Array, Array | None]:
        """Returns the result (..., n) of a product with rows of `a`, new unless given; it and `plus` as matrices."""
        if out is None:
            out = self.empty((*a.shape[:-1], n), a.dtype if plus is None else plus.dtype)
        flat = out.reshape(-1, n)
        added = flat if plus is out else None if plus is None else self.mergeable_rows(plus).reshape(-1, n)
        return out, flat, added

    def _thin_first(self, x: Operands) -> None:
        """Computes `lora_gemm` by cuBLASLt for the thin product, and `dual_gemm` for the rest."""
        assert x.thin is not None
        assert x.a2 is not None
        if x.splits == 1:
            self.matmul(x.a, x.thin, out=x.a2, alpha=x.scale)
        else:
            a, hidden = (y.reshape(len(y), x.splits, -1).transpose(1, 0, 2) for y in (x.a, x.a2))
            self.matmul(a, x.thin.reshape(x.splits, -1, x.thin.shape[1]), out=hidden, alpha=x.scale)
        self.dual_gemm(x.a, x.b, x.a2, x.b2, parts=x.parts, bias=x.bias, plus=x.plus, out=x.out)

    def _separately(self, x: Operands) -> None:
        """Computes `dual_gemm` by two products of cuBLASLt."""
        self.matmul(x.a, x.b, bias=x.bias, out=x.out, plus=x.plus)
        self._add_low_rank(x.out, x.a2, x.b2, x.parts)

    def _add_low_rank(self, out: Array, a2: Array | None, b2: Array | None, parts: int) -> None:
        """Adds a2 @ b2, if there are any, to `out`, of whose columns each of `parts` has its own columns of a2."""
        if a2 is None or b2 is None:
            return
        given: tuple[Array, ...] = a2, b2, out
        left, right, each = (y.reshape(len(y), parts, -1).transpose(1, 0, 2) if parts > 1 else y for y in given)
        self.matmul(left, right, out=each, plus=each)


def _place(cupy: Any) -> str:
    """Returns the card and its driver, on which kept measurements depend."""
    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return f"{found['name'].decode()}, {found['multiProcessorCount']} multiprocessors, driver {driver_version()}"


def _three(xp: Any, x: Array, lead: tuple[int, ...]) -> Array:
    """Returns `x` with its leading dims as one batch; a view unless its strides forbid it."""
    if not lead or (x.ndim == 3 and x.shape[:1] == lead):
        return x
    full = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
    if math.prod(x.shape[:-2]) == 1:
        base = x.reshape(1, *x.shape[-2:])
        return xp.broadcast_to(base, (math.prod(lead), *x.shape[-2:]))
    return full.reshape(-1, *x.shape[-2:])
