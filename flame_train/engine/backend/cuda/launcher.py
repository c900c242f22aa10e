"""What a kernel launcher gets as `k`: allocation, NVIDIA's libraries and our own kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from ...dtype import Array, DType, float32, float64
from ..base import same_place
from .asked import Asked
from .autotune_cache import AutotuneCache, default_folder
from .codegen.column_reduce import Columns
from .codegen.elementwise import Elementwise
from .codegen.moments import Moments
from .codegen.row_sums import RowSums
from .codegen.rows import Rows
from .codegen.scalars import Scalars
from .cubin import Cubins
from .cublaslt import CublasLt, Gelu, NoAlgorithm, is_plain
from .cudnn import CuDnn
from .dual_gemm import DualGemm, Operands
from .launch_hooks import LaunchHooks
from .libraries import driver_version
from .nvrtc import ELEMENT_TYPES, KernelModules, begin, element_name
from .side_stream import SideStream
from .tuning import tuning_for
from .workspace import Workspace

_COPIED = 8  # arrays that one launch copies
_WIDEST = 1 << 16  # the most columns of an 8-bit product whose columns have no factors


class Launcher:
    """Everything that kernel launchers use of the GPU.

    - `barriers`: a counter for each image of a group norm whose blocks wait for each other.
    - `ones`: factors of 1, as stored, for 8-bit products that have none of their own.
    - `elementwise`, `rows`, `row_sums`, `columns`, `moments`, `scalars`: generators of kernels, see their modules.
    """

    def __init__(self, cupy: Any, stream: Any, modules: Any = None) -> None:
        self.xp, self._stream = cupy, stream
        self.launch_hooks = LaunchHooks()
        self.side_stream, self.workspace = SideStream(cupy, stream), Workspace(cupy)
        self._modules = modules or KernelModules(cupy, self.launch_hooks)
        self._erf = cupy.ElementwiseKernel("T x", "T y", "y = erf(x)", "flame_erf")
        device = cupy.cuda.Device()
        self.multiprocessors = int(device.attributes["MultiProcessorCount"])
        self.shared_bytes = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
        # Images that share a launch, each with several blocks, are fewer than multiprocessors.
        self.barriers = cupy.zeros(self.multiprocessors, np.uint32)
        self._biased_apart: set[tuple[int, ...]] = set()  # shapes of 8-bit products without an algorithm for a bias
        self.ones = cupy.ones(_WIDEST, np.float32).view(np.uint32)
        self.compute_capability = int(device.compute_capability)
        self.tuning = tuning_for(self.compute_capability)
        self.elementwise = Elementwise(cupy, self._modules)
        self.scalars = Scalars(self._modules)
        self.rows = Rows(cupy, self._modules, self.tuning)
        self.columns = Columns(cupy, self._modules, self.rows, self.multiprocessors)
        self.row_sums = RowSums(cupy, self._modules, self.rows, self.columns, self.multiprocessors)
        self.moments = Moments(cupy, self._modules, self.columns, self.multiprocessors)

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
    def cudnn(self) -> CuDnn:
        """Loaded on first use."""
        return CuDnn(self.xp, self._stream, self._cache, self.launch_hooks, self.workspace)

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

    # ---- memory --------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """Uninitialised memory."""
        return self.xp.empty(tuple(shape), dtype)

    def contiguous(self, x: Array) -> Array:
        """`x` in row-major memory, itself if it is already."""
        if x.flags.c_contiguous:
            return x
        made = self.empty(x.shape, x.dtype)
        self.copy([made], [x])
        return made

    def aligned(self, value: Any) -> Any:
        """An argument in the form that every kernel can read: 16-byte aligned, without negative strides, vectors dense.

        A view that lies otherwise is copied. Arrays in lists and tuples are treated alike; other values are returned.
        """
        if isinstance(value, (list, tuple)):
            return type(value)([self.aligned(v) for v in value])
        if not isinstance(value, self.xp.ndarray):
            return value
        odd = value.data.ptr & 15 or min(value.strides, default=0) < 0
        return value.copy() if odd or (value.ndim == 1 and not value.flags.c_contiguous) else value

    def mergeable_rows(self, x: Array) -> Array:
        """`x` with equal distances between its rows, so that it reshapes to a matrix: itself, or a dense copy."""
        return x if _evenly(x) else self.contiguous(x)

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copies each source into its target. All targets have one shape and dtype, to which the sources broadcast.

        Our own kernel moves packets where CuPy's moves elements, and copies several arrays in one launch.
        """
        first = targets[0]
        if first.dtype not in ELEMENT_TYPES:
            for target, source in zip(targets, sources, strict=True):
                target[...] = source
            return
        for i in range(0, len(targets), _COPIED):
            given = {f"x{n}": x for n, x in enumerate(sources[i : i + _COPIED])}
            some = tuple(targets[i : i + _COPIED])
            self.elementwise(tuple(given), given, (first.dtype,) * len(some), first.shape, some)

    def concatenated(
        self,
        arrays: Sequence[Array],
        axis: int,
        dtype: DType,
        expressions: Sequence[str] | None = None,
        out: Array | None = None,
    ) -> Array:
        """The arrays, of dtypes that generated kernels know, one after another along an axis; in `out` if given.

        `expressions`, one for each array, are applied to its elements `x`. Without them an array that already lies in
        its place in `out` is not copied.
        """
        lengths = [a.shape[axis] for a in arrays]
        shape = list(arrays[0].shape)
        shape[axis] = sum(lengths)
        out = self.empty(shape, dtype) if out is None else out
        ends = itertools.accumulate(lengths)
        for a, end, value in zip(arrays, ends, expressions or itertools.repeat("x"), strict=False):
            place = [slice(None)] * out.ndim
            place[axis] = slice(end - a.shape[axis], end)
            part = out[tuple(place)]
            if expressions is not None or not same_place(a, part):
                self.elementwise((value,), {"x": a}, (dtype,), out=(part,))
        return out

    # ---- our own kernels -----------------------------------------------------------------------------

    def launch(
        self,
        file: str,
        kernel: str,
        dtype: DType,
        grid: Sequence[int],
        block: int,
        args: Sequence[Any],
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Runs `kernel` of `file`, a path in `engine/`, compiled for elements of `dtype`.

        With `cooperative` all of its blocks run at the same time, so that they may wait for each other, or none does.
        """
        function = self._modules.get(file, kernel, dtype, shared_bytes)
        function(tuple(grid), (block,), tuple(args), shared_mem=shared_bytes, cooperative=cooperative)

    def compile_ahead(self, asked: Asked) -> None:
        """Starts compiling, on threads, what a run on shapes asked for."""
        asked.compile(self._modules, self._cubins)

    def launch_source(self, text: str, kernel: str, threads: int, block: int, args: Sequence[Any]) -> None:
        """Runs `kernel` of `text`, which names its own element types, with at least `threads` in blocks of `block`."""
        if threads:
            self._modules.generated(text, kernel)((-(-threads // block),), (block,), tuple(args))

    def launch_header(
        self,
        header: str,
        kernel: str,
        names: Mapping[str, DType | int],
        grid: Sequence[int],
        block: int,
        args: Sequence[Any],
        before: str = "",
        after: str = "",
    ) -> None:
        """Runs `kernel` of `header`, a path in `engine/`, which builds on dtypes.cuh.

        `names` are the types and constants that the header leaves open.
        T must be among them: the type that most is stored as. `before` and `after` are text put around the header.
        """
        known = [
            f"constexpr int {n} = {v};\n" if isinstance(v, int) else f"typedef {element_name(v)} {n};\n"
            for n, v in names.items()
        ]
        fast = names["T"] != float32
        text = f'{begin(fast)}{"".join(known)}{before}#include "{header}"\n{after}'
        self._modules.generated(text, kernel)(tuple(grid), (block,), tuple(args))

    def launch_sm90(
        self,
        text: str,
        kernel: str,
        dtype: DType,
        grid: Sequence[int],
        block: int,
        args: Sequence[Any],
        shared_bytes: int,
    ) -> None:
        """Runs the only `kernel` of `text`, written for compute capability 9.0 alone, for elements of `dtype`."""
        if self.launch_hooks.should_launch(kernel, args):
            function = self._cubins.get(text, kernel, dtype, shared_bytes)
            function(tuple(grid), (block,), tuple(args), shared_mem=shared_bytes)

    def erf(self, x: Array) -> Array:
        """The error function, elementwise."""
        return self._erf(x)

    # ---- matrix products -----------------------------------------------------------------------------

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
        """alpha * a @ b (+ bias) (+ plus), for a (..., M, K) and b (K, N) or (..., K, N); `plus` may be `out`.

        With `gelu`, for b (K, N) and with its `hidden` (rows, N), what that makes of the product.
        """
        a, b = self._plain(a), self._plain(b)
        if b.ndim == 2 and a.ndim > 2:
            a2 = self.mergeable_rows(a).reshape(-1, a.shape[-1])
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
            return out
        a3, b3, o3 = (_three(self.xp, x, lead) for x in (a, b, out))
        p3 = o3 if plus is out else None if plus is None else _three(self.xp, self.contiguous(plus), lead)
        self.cublaslt.product(a3, b3, o3, bias=bias, alpha=alpha, plus=p3, gelu=gelu)
        return out

    def scaled_product(
        self,
        a: Array,
        a_scales: Array,
        b: Array,
        b_scales: Array,
        *,
        out: Array,
        bias: Array | None = None,
        plus: Array | None = None,
    ) -> None:
        """out (..., N) = a @ b^T (+ bias) (+ plus), for a (M, K) and b (N, K) in e4m3, with a factor for each row.

        See ops/fp8.py. M is the number of rows of `out`, which is dense; `plus` may be `out`.
        """
        flat = out.reshape(-1, len(b))
        added = flat if plus is out else None if plus is None else self.contiguous(plus).reshape(-1, len(b))
        product = partial(self.cublaslt.product, a, b.T, flat, plus=added, scales=(a_scales, b_scales))
        shape = *a.shape, len(b)
        if bias is not None and shape not in self._biased_apart:
            try:
                return product(bias=bias)
            except NoAlgorithm:  # such as long sums of few rows, which are split
                self._biased_apart.add(shape)
        product()
        if bias is not None:
            self.elementwise(("x + bias",), {"x": flat, "bias": bias}, (flat.dtype,), out=(flat,))

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
        """
        a = self.mergeable_rows(a)
        rows = a.reshape(-1, a.shape[-1])
        low = self.empty((len(rows), thin.shape[1] * splits), a.dtype)
        out, flat, added = self._target(a, b.shape[1], plus, out)
        x = Operands(rows, b, low, b2, flat, parts, bias, added, thin, scale, splits)
        if not self.dual_gemms.made(x, self._thin_first):
            self._thin_first(x)
        return out, low

    def _target(self, a: Array, n: int, plus: Array | None, out: Array | None) -> tuple[Array, Array, Array | None]:
        """The result (..., n) of a product with rows of `a`, new unless given; it and `plus` as matrices."""
        if out is None:
            out = self.empty((*a.shape[:-1], n), a.dtype if plus is None else plus.dtype)
        flat = out.reshape(-1, n)
        added = flat if plus is out else None if plus is None else self.mergeable_rows(plus).reshape(-1, n)
        return out, flat, added

    def _thin_first(self, x: Operands) -> None:
        """`lora_gemm` by cuBLASLt for the thin product, and `dual_gemm` for the rest."""
        assert x.thin is not None
        if x.splits == 1:
            self.matmul(x.a, x.thin, out=x.a2, alpha=x.scale)
        else:
            a, low = (y.reshape(len(y), x.splits, -1).transpose(1, 0, 2) for y in (x.a, x.a2))
            self.matmul(a, x.thin.reshape(x.splits, -1, x.thin.shape[1]), out=low, alpha=x.scale)
        self.dual_gemm(x.a, x.b, x.a2, x.b2, parts=x.parts, bias=x.bias, plus=x.plus, out=x.out)

    def _separately(self, x: Operands) -> None:
        """`dual_gemm` by two products of cuBLASLt."""
        self.matmul(x.a, x.b, bias=x.bias, out=x.out, plus=x.plus)
        left, right, out = (
            y.reshape(len(y), x.parts, -1).transpose(1, 0, 2) if x.parts > 1 else y for y in (x.a2, x.b2, x.out)
        )
        self.matmul(left, right, out=out, plus=out)

    def as_stacked_view(self, arrays: Sequence[Array]) -> Array | None:
        """A view of the arrays along a new first dim; None unless they lie at equal distances in memory."""
        first = arrays[0]
        step = arrays[1].data.ptr - first.data.ptr if len(arrays) > 1 else first.nbytes
        for i, a in enumerate(arrays):
            if a.data.ptr != first.data.ptr + i * step or step <= 0:
                return None
            if (a.shape, a.strides, a.dtype) != (first.shape, first.strides, first.dtype):
                return None
        shape, strides = (len(arrays), *first.shape), (step, *first.strides)
        return self.xp.lib.stride_tricks.as_strided(first, shape, strides)

    def stacked(self, arrays: Sequence[Array]) -> Array:
        """The arrays along a new first dim: a view if they lie at equal distances in memory, else a copy."""
        found = self.as_stacked_view(arrays)
        if found is None:  # CuPy's own stack reads addresses from the host, which no graph can
            found = self.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
            self.copy(list(found), arrays)
        return found

    def _plain(self, x: Array) -> Array:
        return x if is_plain(x) else self.contiguous(x)


def _evenly(x: Array) -> bool:
    """True if all dims but the last can be merged into one without a copy."""
    return all(x.shape[i] == 1 or x.strides[i] == x.shape[i + 1] * x.strides[i + 1] for i in range(x.ndim - 2))


def _place(cupy: Any) -> str:
    """The card and its driver, on which kept measurements depend."""
    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return f"{found['name'].decode()}, {found['multiProcessorCount']} multiprocessors, driver {driver_version()}"


def _three(xp: Any, x: Array, lead: tuple[int, ...]) -> Array:
    """`x` with its leading dims as one batch; a view unless its strides forbid it."""
    if not lead or (x.ndim == 3 and x.shape[:1] == lead):
        return x
    full = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
    if math.prod(x.shape[:-2]) == 1:
        base = x.reshape(1, *x.shape[-2:])
        return xp.broadcast_to(base, (math.prod(lead), *x.shape[-2:]))
    return full.reshape(-1, *x.shape[-2:])
