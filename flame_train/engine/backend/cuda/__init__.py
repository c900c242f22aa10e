"""The CUDA backend, built on first use. Everything that touches CuPy lives in this folder."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device import CudaBackend

_LOCK = threading.Lock()
_STATE: list[CudaBackend] = []


def cuda_backend() -> CudaBackend:
    """The one CUDA backend of the process, with its stream current in the calling thread.

    Raises `EnvironmentFault` naming what is missing when no GPU can be used.
    """
    if not _STATE:
        with _LOCK:
            if not _STATE:
                from .device import CudaBackend

                _STATE.append(CudaBackend())
    backend = _STATE[0]
    backend.enter_thread()
    return backend
