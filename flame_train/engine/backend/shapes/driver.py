"""`cupy.cuda` for a described GPU: streams to which nothing is added, and the allocator that arrays take from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .pool import Pointer, Pool


class Gpu(NamedTuple):
    """`capability` as in "90"; `shared_bytes` is the most shared memory that one block may have, `memory` in bytes.

    `name` is that of a card that is there; one that is only described has none.
    """

    capability: str
    multiprocessors: int
    shared_bytes: int
    memory: int = 80 << 30
    name: str = ""


H100 = Gpu("90", 132, 227 << 10)
"""An H100, and an H200 but for its memory."""

RTX_3090 = Gpu("86", 82, 99 << 10, 24 << 30)

T4 = Gpu("75", 40, 64 << 10, 16 << 30)


class Stream:
    """A queue to which nothing is added."""

    ptr = 0

    def use(self) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def begin_capture(self) -> None: ...
    def end_capture(self) -> None: ...

    def record(self) -> Event:
        return Event()


class Event:
    """A moment that has come already."""

    def __init__(self, **_: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class OutOfMemoryError(MemoryError):
    """As CuPy's: the device has no more, or a limit was reached."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(
            f"out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit set to: {limit:,})"
        )


class Cuda:
    """`cupy.cuda` for a described GPU."""

    Event, MemoryPool = Event, Pool

    def __init__(self, gpu: Gpu) -> None:
        self._stream = Stream()
        self._allocator: Callable[[int], Pointer] = Pool().malloc
        attributes = {"MultiProcessorCount": gpu.multiprocessors, "MaxSharedMemoryPerBlockOptin": gpu.shared_bytes}
        self._device = SimpleNamespace(attributes=attributes, compute_capability=gpu.capability, id=0)
        self.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
        self.runtime = SimpleNamespace(
            getDeviceProperties=lambda index: {"name": f"a GPU of compute capability {gpu.capability}"},
            memGetInfo=lambda: (gpu.memory, gpu.memory),
            CUDARuntimeError=OSError,
            memcpyDeviceToHost=2,
            memcpyHostToDevice=1,
            memcpyAsync=lambda *_: None,
        )

    def Stream(self, non_blocking: bool = False) -> Any:  # noqa: N802  # CuPy's name
        return Stream() if non_blocking else self._stream

    def Device(self) -> Any:  # noqa: N802
        return self._device

    def Memory(self, size: int) -> None:  # noqa: N802
        """Nothing: a pool counts what it requested."""

    def MemoryPointer(self, memory: None, offset: int) -> None:  # noqa: N802
        """Nothing."""

    def PinnedMemoryPool(self) -> Any:  # noqa: N802
        return SimpleNamespace(malloc=lambda size: Pointer(None, 0))

    def PinnedMemory(self, size: int) -> Any:  # noqa: N802
        return SimpleNamespace(size=size, ptr=0)

    def get_current_stream(self) -> Any:
        return self._stream

    def alloc(self, size: int) -> Pointer:
        return self._allocator(size)

    def alloc_pinned_memory(self, size: int) -> Any:
        return np.empty(max(1, size), np.uint8).data

    def set_allocator(self, allocator: Callable[[int], Pointer]) -> None:
        self._allocator = allocator

    @contextmanager
    def using_allocator(self, allocator: Callable[[int], Pointer]) -> Iterator[None]:
        before, self._allocator = self._allocator, allocator
        try:
            yield
        finally:
            self._allocator = before
