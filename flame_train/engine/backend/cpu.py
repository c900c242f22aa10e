"""The CPU backend: NumPy and nothing else."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..dtype import Array, DType
from ..mode import mode
from .base import Memory


class CpuBackend:
    """NumPy arrays in host memory."""

    name = "cpu"
    xp: ModuleType = np
    kernels = None

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        return np.empty(tuple(shape), dtype)

    def put(self, host: np.ndarray[Any, Any]) -> Array:
        return np.array(host, copy=True, order="K")

    def get(self, array: Array) -> np.ndarray[Any, Any]:
        if mode().capturing:
            raise RuntimeError(
                "a captured step reads nothing back to the host: move this read out of the step"
            )
        result: np.ndarray[Any, Any] = array
        return result

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        """The whole process's resident memory: NumPy does not count its own."""
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm") as f:
            live = int(f.read().split()[1]) * page
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Memory(live, peak, page * os.sysconf("SC_PHYS_PAGES"))

    def reset_peak(self) -> None:
        pass

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        return fn
