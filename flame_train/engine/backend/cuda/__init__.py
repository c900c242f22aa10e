"""The CUDA backend, built on first use. Everything that touches CuPy lives in this folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device import CudaBackend

_LOCK = threading.Lock()
_STATE: list[CudaBackend] = []
_DESCRIBED: ContextVar[CudaBackend | None] = ContextVar("flame_described", default=None)


def cuda_backend() -> CudaBackend:
    """The one CUDA backend of the process, with its stream current in this thread; inside `standing_in` that one.

    Raises `EnvironmentFault` naming what is missing when no GPU can be used.
    """
    instead = _DESCRIBED.get()
    if instead is not None:
        return instead
    if not _STATE:
        with _LOCK:
            if not _STATE:
                from .device import CudaBackend

                _STATE.append(CudaBackend())
    backend = _STATE[0]
    backend.enter_thread()
    return backend


@contextmanager
def standing_in(backend: CudaBackend) -> Iterator[None]:
    """Inside, "cuda" means `backend`, the one of a described GPU (`described.py`)."""
    token = _DESCRIBED.set(backend)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)
