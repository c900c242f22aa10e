"""Prefetch: arrays are copied to the device while other work runs, through pinned memory, on a stream of their own.

Uploads of the same names, shapes and dtypes alternate between two buffers. A buffer is filled again only after its
last upload was released, and the device has done what was queued until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...dtype import Array

HostArray = np.ndarray[Any, Any]

_BUFFERS = 2


class CudaUploader:
    """Submits from one thread, waits and releases in another."""

    def __init__(
        self, cupy: ModuleType, main: Any, enter_thread: Callable[[], None], malloc: Callable[[int], Any]
    ) -> None:
        """For work that is queued on the stream `main`.

        Args:
            cupy: the module.
            main: the stream of the work.
            enter_thread: makes the GPU current in a thread.
            malloc: device memory that no work on `main` has used. What that stream's pool gives away may still be read
                by kernels in the queue, for which the copies here do not wait.
        """
        self._cupy, self._main, self._enter_thread, self._malloc = cupy, main, enter_thread, malloc
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._buffers: dict[tuple[Any, ...], list[_UploadBuffer]] = {}

    def submit(self, arrays: Mapping[str, HostArray]) -> _UploadBuffer:
        """Starts copying; returns at once, unless both buffers for these shapes are still in use."""
        self._enter_thread()
        kind = tuple((name, a.shape, a.dtype) for name, a in sorted(arrays.items()))
        buffers = self._buffers.setdefault(kind, [])
        if len(buffers) < _BUFFERS:
            with self._cupy.cuda.using_allocator(self._malloc):
                buffers.append(_UploadBuffer(self._cupy, self._main, arrays))
        else:
            buffers.append(buffers.pop(0))
        buffers[-1].fill(arrays, self._stream)
        return buffers[-1]


class _UploadBuffer:
    """Pinned memory, device memory, and the events that order their use. It is the upload (`base.Upload`) in it."""

    def __init__(self, cupy: ModuleType, main: Any, arrays: Mapping[str, HostArray]) -> None:
        self._main, pinned = main, cupy.cuda.alloc_pinned_memory
        self._host = {n: np.frombuffer(pinned(a.nbytes), a.dtype, a.size).reshape(a.shape) for n, a in arrays.items()}
        self._device = {n: cupy.empty(a.shape, a.dtype) for n, a in arrays.items()}
        self._arrived = cupy.cuda.Event(disable_timing=True)
        self._released = cupy.cuda.Event(disable_timing=True)

    def fill(self, arrays: Mapping[str, HostArray], stream: Any) -> None:
        """Copies the arrays in, once the last ones have been released and read."""
        self._released.synchronize()
        for name, a in arrays.items():
            self._host[name][...] = a
            self._device[name].set(self._host[name], stream=stream)
        self._arrived.record(stream)

    def wait(self) -> Mapping[str, Array]:
        """Returns the arrays on the device: work queued from now on waits for their arrival."""
        self._main.wait_event(self._arrived)
        return self._device

    def release(self) -> None:
        """Declares that no work queued from now on reads the arrays."""
        self._released.record(self._main)
