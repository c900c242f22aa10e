"""Copies of host arrays to the device, through pinned buffers that several threads fill.

The driver copies pageable memory by one thread, at a small part of the link's rate. Here threads fill pinned buffers by
turns, and the device reads some while others are filled. What a file maps is read from the file into the buffer: that
spares the faults of pages that the process has not looked at yet.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

HostArray = np.ndarray[Any, Any]
LEAST = 256 << 10
"""Bytes of the smallest array that is copied this way: a smaller one the driver copies as fast."""
_CHUNK = 4 << 20
_MOST_THREADS = 8
_BUFFERS = 2  # to a thread: the device reads one while the thread fills the other


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

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "upload")

    @cached_property
    def _free(self) -> queue.SimpleQueue[_Buffer]:
        """The buffers that no thread fills, longest unused first."""
        free, count = queue.SimpleQueue[_Buffer](), _BUFFERS * self._threads
        held = self._cupy.cuda.alloc_pinned_memory(count * self._chunk)  # at once: the driver takes long for each
        for host in np.frombuffer(held, np.uint8, count * self._chunk).reshape(count, self._chunk):
            free.put(_Buffer(self._cupy, host))
        return free

    def begin(self, target: int, host: HostArray) -> Callable[[], None]:
        """Starts copying a contiguous array to the address `target`.

        `host` must stay as it is until a call of the result returns. Work queued on the stream afterwards finds the
        copy. Of several copies the threads take the one that was begun first.
        """
        fill, size, free = _reader(host), host.nbytes, self._free
        begun = [
            self._pool.submit(self._copy_chunk, free, fill, start, min(self._chunk, size - start), target)
            for start in range(0, size, self._chunk)
        ]

        def wait() -> None:
            for copied in begun:
                copied.result()

        return wait

    def _copy_chunk(
        self, free: queue.SimpleQueue[_Buffer], fill: Callable[[HostArray, int], None], start: int, size: int, to: int
    ) -> None:
        self._enter_thread()
        buffer = free.get()
        try:
            buffer.send(fill, start, size, to, self._stream)
        finally:
            free.put(buffer)


def _reader(host: HostArray) -> Callable[[HostArray, int], None]:
    """Returns what fills a buffer with the bytes of `host` from a place on."""
    owner: Any = host
    while isinstance(owner, np.ndarray):
        owner = owner.base
    mapped: Any = owner.obj if isinstance(owner, memoryview) else owner
    if hasattr(mapped, "read_into"):  # `io/mapped_file.py`
        begin = host.ctypes.data - np.frombuffer(mapped, np.uint8, 1).ctypes.data
        return lambda buffer, start: mapped.read_into(buffer.data, begin + start)
    source = host.reshape(-1).view(np.uint8)
    return lambda buffer, start: np.copyto(buffer, source[start : start + len(buffer)])


class _Buffer:
    """Pinned memory and the event after which it may be filled again."""

    def __init__(self, cupy: Any, host: HostArray) -> None:
        self._runtime, self._host = cupy.cuda.runtime, host
        self._read = cupy.cuda.Event(disable_timing=True)

    def send(self, fill: Callable[[HostArray, int], None], start: int, size: int, to: int, stream: Any) -> None:
        self._read.synchronize()
        fill(self._host[:size], start)
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(to + start, self._host.ctypes.data, size, kind, stream.ptr)
        self._read.record(stream)
