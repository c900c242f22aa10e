"""Running a step on shapes alone: no data and no GPU, for the memory that it takes and the products that it makes.

with shape_run(H100) as run:
    step(...)  # on device "cuda", whose arrays have shapes, dtypes and addresses, and no memory
run.peak_bytes, run.flops

The step runs through the code that runs it on a GPU. The same kernels are chosen, the same arrays allocated, saved and
freed, from pools that follow CuPy's rules. Launches alone do nothing, and the workspaces of cuDNN's plans, whose sizes
only the library knows, go by the rules of `backend/cuda/described_libraries.py`. What is read back is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import EnvironmentFault
from .backend import get_backend
from .backend.cuda import standing_in
from .backend.cuda.described import ShapeBackend, Traffic
from .backend.cuda.kernel_requests import KernelRequests
from .backend.cuda.launch_hooks import Flops
from .backend.shapes.driver import H100, RTX_3090, Gpu

__all__ = [
    "H100",
    "RTX_3090",
    "Flops",
    "Gpu",
    "KernelRequests",
    "ShapeRun",
    "Traffic",
    "compile_ahead",
    "gpu_of",
    "shape_run",
]


class ShapeRun:
    """What a run on shapes has taken so far."""

    def __init__(self, backend: ShapeBackend) -> None:
        self.backend = backend

    @property
    def peak_bytes(self) -> int:
        """Peak memory in bytes, counted as `memory` in the log: tensors, and what captured graphs keep."""
        peak = self.backend.memory().peak
        assert peak is not None
        return peak

    @property
    def live_bytes(self) -> int:
        """What is taken now."""
        return self.backend.memory().live

    @property
    def host_bytes(self) -> int:
        """Of arrays that wait in host memory for good."""
        return self.backend.host_bytes

    @property
    def flops(self) -> Flops:
        """Floating-point operations of products so far, two a multiply-add."""
        found = self.backend.kernels.launch_hooks.flops
        assert found is not None
        return found

    @property
    def traffic(self) -> Traffic:
        """What was launched and moved so far."""
        return self.backend.traffic

    @property
    def kernel_requests(self) -> KernelRequests:
        """The kernels that were requested so far."""
        return self.backend.kernel_requests

    def multiplied(self, fn: Callable[[], object]) -> dict[str, int]:
        """Returns the floating-point operations of what `fn` multiplies, by kind, without what it multiplies again."""
        before = self.flops.once.copy()
        fn()
        return dict(self.flops.once - before)


def gpu_of(device: str) -> Gpu:
    """Returns the GPU of this machine, as a run on shapes knows it; an H100 where there is none, or for the CPU."""
    if device == "cpu":
        return H100
    try:
        backend = get_backend(device)
    except EnvironmentFault:
        return H100
    k = backend.kernels
    return Gpu(str(k.compute_capability), k.multiprocessors, k.shared_bytes, backend.memory().total, backend.card)


def compile_ahead(requests: KernelRequests) -> None:
    """Compiles, on threads of "cuda", the kernels that a run on shapes requested. Who needs one waits for it."""
    get_backend("cuda").kernels.compile_ahead(requests)


@contextmanager
def shape_run(gpu: Gpu = H100) -> Iterator[ShapeRun]:
    """Inside, "cuda" is the described GPU in this thread, and nothing is computed there."""
    backend = ShapeBackend(gpu)
    with standing_in(backend):
        yield ShapeRun(backend)
