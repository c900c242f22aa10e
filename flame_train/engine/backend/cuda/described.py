"""The CUDA backend for a described GPU: its own code from the choice of a kernel to its launch, which does nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from ...dtype import Array, DType, float32
from ...mode import mode
from ..shapes.array import ShapeArray
from ..shapes.driver import Gpu
from ..shapes.pool import GRAIN
from ..shapes.shape_namespace import ShapeNamespace
from .autotuner import AutotuneCache
from .block_scales import SINCE
from .device import CudaBackend
from .dual_gemm import DualGemm, Operands
from .dual_gemm_tiles import Tile
from .kernel_requests import KernelRequests
from .launch_hooks import Flops, LaunchHooks
from .launcher import Launcher
from .libraries.cublaslt import _WORKSPACE_BYTES as PRODUCTS_BYTES
from .libraries.cublaslt import Gelu
from .libraries.cudnn import CuDnn
from .workspace import Workspace

PRODUCTS = "matrix products"


class Traffic:
    """What a run on shapes moves: launches of kernels and products, bytes of their operands, and bytes to or from the
    host. Of the products' operations, `narrow` are in 8 bits.
    """

    def __init__(self) -> None:
        self.launches = self.operands = self.copied = self.narrow = 0

    def launched(self, args: Sequence[Any] = ()) -> None:
        """Notes a launch with its arguments, of which arrays are read or written whole."""
        self.launches += 1
        self.operands += sum(int(a.nbytes) for a in args if isinstance(a, ShapeArray))


class Modules:
    """Kernels that do nothing: none is compiled or even read. They record the requests, and what they would move."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.files = dict[tuple[str, str, DType, int], None]()
        self.texts = dict[tuple[str, str], None]()

    def get(self, file: str, kernel: str, dtype: DType, shared_bytes: int = 0) -> Callable[..., None]:
        self.files[file, kernel, dtype, shared_bytes] = None
        return self._launch

    def generated(self, text: str, kernel: str) -> Callable[..., None]:
        self.texts[text, kernel] = None
        return self._launch

    def _launch(self, grid: Any, block: Any, args: Sequence[Any] = (), **_: Any) -> None:
        self._traffic.launched(args)


class Products:
    """In cuBLASLt's place: one workspace for all products."""

    def __init__(self, cupy: Any, launch_hooks: LaunchHooks, traffic: Traffic) -> None:
        self._launch_hooks, self._workspace = launch_hooks, cupy.cuda.alloc(PRODUCTS_BYTES)
        self._traffic = traffic

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
        """Counts 2 M N K for each matrix.

        Args:
            a, b, out: the factors and the result, (..., M, K), (..., K, N) and (..., M, N).
            bias, alpha, plus, gelu, scales, blocks: as in `CublasLt.product`; they change no count.
        """
        flops = 2 * out.size * a.shape[-1]
        self._launch_hooks.multiplied(PRODUCTS, flops)
        self._traffic.launched()
        self._traffic.narrow += flops if a.itemsize == 1 else 0


class Pairs(DualGemm):
    """The kernel of our own for two products, where the rule takes it: nothing is timed."""

    traffic: Traffic

    def run(self, tile: Tile, x: Operands) -> None:
        self._function(tile, x)
        (m, k), n, rank = x.a.shape, x.out.shape[1], x.rank
        self._launch_hooks.multiplied(PRODUCTS, 2 * m * n * (k + rank))
        self.traffic.narrow += 2 * m * n * k if x.a.itemsize == 1 else 0
        if x.thin is not None:
            self._launch_hooks.multiplied(PRODUCTS, 2 * m * k * x.thin.shape[1])

    def _choose(self, problem: Any, x: Operands, otherwise: Any) -> Tile | None:
        return super()._choose(problem._replace(measured=False), x, otherwise)


class Plans(CuDnn):
    """In cuDNN's place: counts, and works in what the rules above say."""

    def __init__(self, workspace: Workspace, launch_hooks: LaunchHooks) -> None:
        self._workspace, self._launch_hooks = workspace, launch_hooks

    def _run(self, key: tuple[Any, ...], dtype: DType, build: Callable[..., None], arrays: dict[str, Array]) -> None:
        self._workspace.get(workspace_bytes(key[0], dtype, arrays))
        kind = "attention" if key[0].startswith("sdpa") else "convolution"
        self._launch_hooks.multiplied(kind, _flops(key[0], arrays))


def workspace_bytes(kind: str, dtype: DType, arrays: dict[str, Array]) -> int:
    """Bytes that a plan of cuDNN's works in."""
    if kind == "sdpa":
        return 0
    if kind == "sdpa_backward":
        return _attention_bytes(arrays["q"], arrays["k"], arrays["v"], mode().deterministic or "db" in arrays)
    images = [a for name, a in arrays.items() if name in ("x", "y", "g", "dx")]
    return sum(int(a.nbytes) for a in images) if dtype == float32 else 0


def _attention_bytes(queries: Array, keys: Array, values: Array, scores: bool) -> int:
    batch, heads, length, _ = queries.shape
    sums = int(queries.size) * float32.itemsize
    if scores:
        sums = batch * heads * -(-length // 64) * 64 * -(-keys.shape[2] // 128) * 128 * queries.itemsize
    shared = heads // keys.shape[1] if heads != keys.shape[1] else 0
    return sums + shared * (int(keys.nbytes) + int(values.nbytes))


def _flops(kind: str, arrays: dict[str, Array]) -> int:
    """Attention is two products, one of them with keys, and its gradients five, three of them with keys."""
    if kind.startswith("sdpa"):
        queries, keys, values = arrays["q"], arrays["k"], arrays["v"]
        scores = math.prod(queries.shape[:-1]) * int(keys.shape[-2])
        with_keys, others = (1, 1) if kind == "sdpa" else (3, 2)
        return 2 * scores * (with_keys * int(queries.shape[-1]) + others * int(values.shape[-1]))
    weight = arrays["w" if "w" in arrays else "dw"]
    return 2 * int(arrays["y" if "y" in arrays else "g"].size) * int(weight.size) // int(weight.shape[0])


class ShapeLauncher(Launcher):
    """`Launcher` whose launches do nothing, but for what they say that they multiply."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self.traffic = Traffic()
        self._made = Modules(self.traffic)
        super().__init__(cupy, stream, self._made)
        self.launch_hooks.flops = Flops()

    @cached_property
    def scales_blocks(self) -> bool:
        return self.compute_capability >= SINCE

    @cached_property
    def cublaslt(self) -> Any:
        return Products(self.xp, self.launch_hooks, self.traffic)

    @cached_property
    def cudnn(self) -> Any:
        return Plans(self.workspace, self.launch_hooks)

    @cached_property
    def dual_gemms(self) -> Pairs:
        nowhere = AutotuneCache(None, "")
        card = self.multiprocessors, self.compute_capability
        made = Pairs(self.xp, self._stream, nowhere, self.launch_hooks, self._cubins, *card)
        made.traffic = self.traffic
        return made

    @cached_property
    def _cubins(self) -> Any:
        return Modules(self.traffic)

    @property
    def kernel_requests(self) -> KernelRequests:
        """The kernels that were requested so far."""
        return KernelRequests(
            tuple(self._made.files), tuple(self._made.texts), tuple(self._cubins.files), tuple(self.xp.calls)
        )


class _Replay:
    """A captured graph, which takes no memory of its own."""

    def launch(self, stream: Any) -> None:
        """Does nothing."""


class ShapeBackend(CudaBackend):
    """One described GPU. Its pools give out addresses, so its peak is what the real one's would be."""

    described = True

    def __init__(self, gpu: Gpu) -> None:
        cupy: Any = ShapeNamespace(gpu)
        super().__init__(cupy, ShapeLauncher)
        cupy.backend = self
        cupy.cuda.runtime.memcpyAsync = self._copied
        self._grows = False

    @property
    def limit(self) -> int:
        """Bytes that the pools may take together; 0: as many as the device has."""
        return self._pools.limit

    def begin_with_limit(self, size: int) -> None:
        """A limit that is raised where the run would end: afterwards `limit` says how much it needed."""
        self._pools.limit, self._grows = size, True

    def _taken(self, pool: Any, size: int) -> Any:
        try:
            return super()._taken(pool, size)
        except MemoryError:
            if not self._grows:
                raise
        self._pools.limit = self._pools.total_bytes() + -(-size // GRAIN) * GRAIN
        return pool.malloc(size)

    def _beside_graphs(self, fn: Callable[[], None]) -> bool:
        grows, self._grows = self._grows, False  # graphs are dropped before the limit is raised
        try:
            return super()._beside_graphs(fn)
        finally:
            self._grows = grows

    def _copied(self, target: int, source: int, size: int, *_: int) -> None:
        """A copy between device and host."""
        self.traffic.copied += size

    @property
    def copied_beside(self) -> int:
        """Of the bytes that were copied so far, those that come from the host while other work runs."""
        return self._host_copies.begun_bytes

    @property
    def traffic(self) -> Traffic:
        """What was moved so far."""
        assert isinstance(self.kernels, ShapeLauncher)
        return self.kernels.traffic

    @property
    def kernel_requests(self) -> KernelRequests:
        """The kernels that were requested so far."""
        assert isinstance(self.kernels, ShapeLauncher)
        return self.kernels.kernel_requests

    def recorded(self) -> Any:
        return _Replay()
