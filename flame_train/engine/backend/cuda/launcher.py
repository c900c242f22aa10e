"""What a kernel launcher gets as `k`: allocation, NVIDIA's libraries and our own kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...dtype import Array, DType, float32
from ..base import same_place
from ..cupy_calls import CupyCall
from .block_scales import BlockScales
from .codegen.column_reduce import Columns
from .codegen.elementwise import Elementwise
from .codegen.moments import Moments
from .codegen.row_sums import RowSums
from .codegen.rows import Rows
from .codegen.scalars import Scalars
from .host_copies import SideStream
from .kernel_requests import KernelRequests
from .launch_hooks import LaunchHooks
from .libraries.cublaslt import SUPPORTED
from .libraries.cudnn import CuDnn
from .nvrtc import KernelModules, begin, element_name
from .products import Products
from .transpose import Transposes
from .tuning import tuning_for
from .workspace import Workspace


class CapturableNamespace:
    """CuPy for references, with replacements for functions that cannot be captured in a graph.

    CuPy's matrix products cannot, so cuBLASLt makes them. To join more than eight small arrays CuPy copies their
    addresses from the host, so they are joined eight at a time.
    """

    _AT_ONCE = 8

    def __init__(self, kernels: Launcher) -> None:
        self._xp, self._kernels = kernels.xp, kernels

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        setattr(self, name, found)
        return found

    def matmul(self, a: Array, b: Array) -> Array:
        """a @ b as numpy.matmul; vectors and integers are left to CuPy."""
        if min(a.ndim, b.ndim) < 2 or a.dtype != b.dtype or a.dtype not in SUPPORTED:
            return self._xp.matmul(a, b)
        return self._kernels.matmul(a, b)

    def concatenate(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """Returns the arrays one after another along an axis."""
        n = self._AT_ONCE
        while len(arrays) > n:
            arrays = [self._xp.concatenate(arrays[i : i + n], axis=axis) for i in range(0, len(arrays), n)]
        return self._xp.concatenate(arrays, axis=axis)

    def stack(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """Returns the arrays side by side along a new axis."""
        return self.concatenate([self._xp.expand_dims(a, axis) for a in arrays], axis)


_WIDEST = 1 << 16  # the most columns of an 8-bit product whose columns have no factors


class Launcher(Products):
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
        self._biased_apart = set()
        self.ones = cupy.ones(_WIDEST, np.float32).view(np.uint32)
        self.compute_capability = int(device.compute_capability)
        self.tuning = tuning_for(self.compute_capability)
        self.elementwise, self.transposes = Elementwise(cupy, self._modules), Transposes(self._modules)
        self.scalars, self.block_scales = Scalars(self._modules), BlockScales(cupy, self._modules)
        self.rows = Rows(cupy, self._modules, self.tuning)
        self.columns = Columns(cupy, self._modules, self.rows, self.multiprocessors)
        self.row_sums = RowSums(cupy, self._modules, self.rows, self.columns, self.multiprocessors)
        self.moments = Moments(cupy, self._modules, self.columns, self.multiprocessors)

    @cached_property
    def cudnn(self) -> CuDnn:
        """Loaded on first use."""
        return CuDnn(self.xp, self._stream, self._cache, self.launch_hooks, self.workspace)

    # ---- memory --------------------------------------------------------------------------------------

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

        Args:
            arrays: what is joined.
            axis: the axis.
            dtype: the result's dtype.
            expressions: C over `x`, one for each array, or None.
            out: an array for the result, or None.

        Returns:
            The joined array.
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

        Args:
            file: the path of the source.
            kernel: the kernel's name.
            dtype: the dtype of the elements.
            grid: blocks along each dim.
            block: threads of a block.
            args: the kernel's arguments.
            shared_bytes: dynamic shared memory of a block.
            cooperative: whether all blocks run at the same time.
        """
        function = self._modules.get(file, kernel, dtype, shared_bytes)
        function(tuple(grid), (block,), tuple(args), shared_mem=shared_bytes, cooperative=cooperative)

    def compile_ahead(self, requests: KernelRequests) -> None:
        """Starts compiling, on threads, the kernels that a run on shapes requested."""
        cuda = self.xp.cuda
        device, pool = cuda.Device(), cuda.MemoryPool()

        def beside(call: CupyCall) -> None:
            with device, cuda.Stream(non_blocking=True), cuda.using_allocator(pool.malloc):
                call.make(self.xp)

        requests.compile(self._modules, self._cubins, beside)

    def launch_source(self, text: str, kernel: str, threads: int, block: int, args: Sequence[Any]) -> None:
        """Runs `kernel` of `text`, which names its own element types, with at least `threads` in blocks of `block`.

        Args:
            text: the source.
            kernel: the kernel's name.
            threads: the least number of threads.
            block: threads of a block.
            args: the kernel's arguments.
        """
        if threads:
            self._modules.generated(text, kernel)((-(-threads // block),), (block,), tuple(args))

    def generated(self, text: str, kernel: str) -> Any:
        """Returns the function `kernel` of a text that names its own element types, compiled once."""
        return self._modules.generated(text, kernel)

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

        Args:
            kernel, grid, block, args: as in `launch`.
            header: the path of the header.
            names: types and constants by name.
            before, after: text around the header.
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
        """Runs the only `kernel` of `text`, written for compute capability 9.0 alone, for elements of `dtype`.

        Args:
            kernel, dtype, grid, block, args, shared_bytes: as in `launch`.
            text: the source.
        """
        if self.launch_hooks.should_launch(kernel, args):
            function = self._cubins.get(text, kernel, dtype, shared_bytes)
            function(tuple(grid), (block,), tuple(args), shared_mem=shared_bytes)

    def erf(self, x: Array) -> Array:
        """Returns the error function, elementwise."""
        return self._erf(x)
