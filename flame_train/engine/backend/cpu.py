"""The CPU backend: NumPy and nothing else."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import psutil

from ...errors import HostRead
from ..dtype import Array, DType, HostBytes
from ..mode import mode
from .base import Memory
from .host_memory import Allocations, Peak, resident

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT, _PLAIN = 1 << 28, 1 << 26  # bytes


def _keep_freed_memory() -> None:
    """Has glibc keep freed blocks to 64 MiB, 256 MiB in all; clearing pages anew would take most of an operation."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # other C libraries have none
            mallopt(_M_MMAP_THRESHOLD, _PLAIN)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)


class _HostUpload:
    """An upload that has arrived already."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def wait(self) -> Mapping[str, Array]:
        return self._arrays

    def release(self) -> None:
        pass


class _HostUploader:
    def submit(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> _HostUpload:
        return _HostUpload({name: a.copy() for name, a in arrays.items()})


class _HostCopy:
    """An array that waits beside the memory of tensors, which is host memory as well."""

    def __init__(self, held: Array, kept: weakref.WeakSet[_HostCopy] | None) -> None:
        self._held, self.nbytes = held, int(held.nbytes)
        if kept is not None:
            kept.add(self)

    def reload(self) -> Array:
        return self._held.copy()

    def fetch(self, out: Array) -> Callable[[], None]:
        out[...] = self._held
        return lambda: None


class CpuBackend:
    """NumPy arrays in host memory."""

    name = card = "cpu"
    pci_bus_id = ""
    xp: ModuleType = np
    references: ModuleType = np
    kernels = None
    described = False
    asynchronous = False
    program = 0

    def __init__(self) -> None:
        self._peak, self._allocations = Peak(), Allocations()
        self._kept = weakref.WeakSet[_HostCopy]()
        _keep_freed_memory()

    def enter_thread(self) -> None:
        pass

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        return np.empty(tuple(shape), dtype)

    def to_device(self, host: np.ndarray[Any, Any]) -> Array:
        return np.array(host, copy=True, order="K")

    def begin_upload(self, host: np.ndarray[Any, Any]) -> Callable[[], Array]:
        array = self.to_device(host)
        return lambda: array

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        if mode().capturing:
            raise HostRead("a captured step reads nothing back to the host: move this read out of the step")
        result: np.ndarray[Any, Any] = array
        return result

    def get_async(self, array: Array) -> Callable[[], np.ndarray[Any, Any]]:
        held = self.to_host(array).copy()
        return lambda: held

    def offload(self, array: Array, *, keep: bool = False) -> _HostCopy:
        return _HostCopy(np.array(array, copy=True, order="K"), self._kept if keep else None)

    def keep_in(self, memory: HostBytes, array: Array | None) -> _HostCopy:
        if array is not None:
            memory[...] = array
        return _HostCopy(memory, self._kept)

    @property
    def host_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._kept)

    def write(self, target: Array, host: np.ndarray[Any, Any]) -> None:
        target[...] = host

    def uploader(self) -> _HostUploader:
        return _HostUploader()

    def synchronize(self) -> None:
        pass

    def wait_side_stream(self) -> None:
        pass

    def memory(self) -> Memory:
        """Returns the whole process's resident memory: NumPy does not count its own."""
        live, peak = resident(), self._peak.read()
        return Memory(live, None if peak is None else max(peak, live), int(psutil.virtual_memory().total))

    def free_memory(self) -> int:
        return int(psutil.virtual_memory().available)

    def limit_memory(self, size: int) -> None:
        """Raises ValueError for a limit: NumPy takes its memory from the system."""
        if size:
            raise ValueError("limit_memory: expected a GPU, got the CPU, whose arrays are the system's to give")

    def reset_peak(self) -> None:
        self._peak.reset()

    def watch_peak(self) -> Callable[[], int]:
        return self._allocations.watch()

    def empty_cache(self) -> None:
        pass

    def run_once(self, fn: Callable[[], None]) -> None:
        fn()

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        return fn
