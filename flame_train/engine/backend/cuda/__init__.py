"""The CUDA backends, one a GPU, each built on first use. Everything that touches CuPy lives in this folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ...dtype import Array

if TYPE_CHECKING:
    from .device import CudaBackend

_LOCK = threading.Lock()
_STATE: dict[int, CudaBackend] = {}
_DESCRIBED: ContextVar[CudaBackend | None] = ContextVar("flame_described", default=None)


def cuda_backend(index: int = 0) -> CudaBackend:
    """The CUDA backend of GPU `index`, with that GPU and its stream current in this thread; inside `standing_in` that.

    Raises `EnvironmentFault` naming what is missing when no GPU can be used, and those there are where `index` is not.
    """
    instead = _DESCRIBED.get()
    if instead is not None:
        return instead
    if index not in _STATE:
        with _LOCK:
            if index not in _STATE:
                _build(index)
    backend = _STATE[index]
    backend.enter_thread()
    return backend


def gpu_count() -> int:
    """How many GPUs this process can see. Raises EnvironmentFault where CuPy, the driver or a GPU is missing."""
    from .device import cupy_and_gpus

    return cupy_and_gpus()[1]


def _build(index: int) -> None:
    from .device import CudaBackend, allocate_by_device

    _STATE[index] = CudaBackend(index=index)
    if len(_STATE) > 1:  # CuPy has one allocator, each GPU a pool of its own
        allocate_by_device(_STATE)


def several_gpus() -> bool:
    """Tells whether this process uses more than one GPU, so that two tensors on GPUs may be on different ones."""
    return len(_STATE) > 1


def backend_of_array(array: Array) -> CudaBackend:
    """Returns the backend of the GPU that an array of CuPy's is on."""
    if len(_STATE) == 1 and _DESCRIBED.get() is None:
        backend = next(iter(_STATE.values()))
        backend.enter_thread()
        return backend
    return cuda_backend(int(array.device.id))


def current_gpu() -> CudaBackend:
    """Returns the backend of the GPU that the op now running in this thread runs on."""
    if len(_STATE) < 2 or _DESCRIBED.get() is not None:
        return cuda_backend(next(iter(_STATE), 0))
    return cuda_backend(int(_STATE[next(iter(_STATE))].xp.cuda.runtime.getDevice()))


@contextmanager
def standing_in(backend: CudaBackend) -> Iterator[None]:
    """Inside, "cuda" means `backend`, the one of a described GPU (`described.py`)."""
    token = _DESCRIBED.set(backend)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)
