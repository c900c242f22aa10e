"""The CUDA backend for a described GPU: its own code from the choice of a kernel to its launch, which does nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ..shapes.gpu import Gpu
from ..shapes.namespace import ShapeNamespace
from ..shapes.pool import GRAIN
from .autotune_cache import AutotuneCache
from .described_libraries import Modules, Pairs, Plans, Products, Traffic
from .device import CudaBackend
from .kernel_requests import KernelRequests
from .launch_hooks import Flops
from .launcher import Launcher


class ShapeLauncher(Launcher):
    """`Launcher` whose launches do nothing, but for what they say that they multiply."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self.traffic = Traffic()
        self._made = Modules(self.traffic)
        super().__init__(cupy, stream, self._made)
        self.launch_hooks.flops = Flops()

    @cached_property
    def cublaslt(self) -> Any:
        return Products(self.xp, self.launch_hooks, self.traffic)

    @cached_property
    def cudnn(self) -> Any:
        return Plans(self.workspace, self.launch_hooks)

    @cached_property
    def dual_gemms(self) -> Pairs:
        nowhere = AutotuneCache(None, "")
        return Pairs(
            self.xp,
            self._stream,
            nowhere,
            self.launch_hooks,
            self._cubins,
            self.multiprocessors,
            self.compute_capability,
        )

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
