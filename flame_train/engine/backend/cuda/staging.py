"""Copies of large host arrays to the device, through pinned buffers that several threads fill.

The driver copies pageable memory by one thread, at a small part of the link's rate, and waits for each page of a mapped
file. Here each thread copies its chunks into two pinned buffers of its own by turns, and the device reads one while the
thread fills the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]
LEAST = 8 << 20
"""Bytes of the smallest array that is copied this way: of a smaller one the driver's own copy takes a few ms."""
_CHUNK = 4 << 20
_MOST_THREADS = 8


class Staging:
    """Pinned buffers and the threads that fill them, made at the first copy.

    Args:
        cupy: the module.
        stream: the stream on which the device copies.
        enter_thread: makes the GPU current in a thread.
        chunk: bytes of a buffer.
    """

    def __init__(self, cupy: Any, stream: Any, enter_thread: Callable[[], None], chunk: int = _CHUNK) -> None:
        self._cupy, self._stream, self._enter_thread, self._chunk = cupy, stream, enter_thread, chunk
        self._threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
        self._lock = threading.Lock()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "upload")

    @cached_property
    def _buffers(self) -> list[list[_Buffer]]:
        """Two for each thread."""
        return [[_Buffer(self._cupy, self._chunk) for _ in range(2)] for _ in range(self._threads)]

    def copy(self, target: int, host: HostArray) -> None:
        """Copies a contiguous array to the address `target`. Work queued later on the stream finds it there.

        `host` may change or go once this returns.
        """
        source = host.reshape(-1).view(np.uint8)
        with self._lock:
            begun = [
                self._pool.submit(self._copy_chunks, target, source, first, buffers)
                for first, buffers in enumerate(self._buffers)
            ]
            for copied in begun:
                copied.result()

    def _copy_chunks(self, target: int, source: HostArray, first: int, buffers: list[_Buffer]) -> None:
        """Copies every chunk of which the number, divided by the threads, leaves `first`."""
        self._enter_thread()
        starts = range(first * self._chunk, len(source), self._threads * self._chunk)
        for turn, start in enumerate(starts):
            buffers[turn % 2].send(source[start : start + self._chunk], target + start, self._stream)


class _Buffer:
    """Pinned memory and the event after which it may be filled again."""

    def __init__(self, cupy: Any, size: int) -> None:
        self._runtime = cupy.cuda.runtime
        self._host = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        self._read = cupy.cuda.Event(disable_timing=True)

    def send(self, source: HostArray, target: int, stream: Any) -> None:
        self._read.synchronize()
        np.copyto(self._host[: len(source)], source)
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(target, self._host.ctypes.data, len(source), kind, stream.ptr)
        self._read.record(stream)
