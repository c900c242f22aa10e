"""Copies through pinned buffers, on a device that copies as late as it may."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.staging import Staging


class LateDevice:
    """A stand-in for CuPy whose copies are made when somebody waits for an event, or at `finish`."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self.ptr = 0
        runtime = SimpleNamespace(memcpyAsync=self._copy, memcpyHostToDevice=1)
        self.cuda = SimpleNamespace(runtime=runtime, alloc_pinned_memory=bytearray, Event=lambda **_: self._event())

    def _copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        with self._lock:
            self._queue.append(lambda: ctypes.memmove(to, source, size))

    def _event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, synchronize=self.finish)

    def finish(self) -> None:
        with self._lock:
            while self._queue:
                self._queue.pop(0)()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 64 * 7, 64 * 40 + 3, 64 * 200])
def test_all_bytes_arrive_though_buffers_are_used_again(size: int) -> None:
    device = LateDevice()
    host = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target, kept = np.zeros(size, np.uint8), host.copy()
    staging = Staging(device, device, lambda: None, chunk=64)
    staging.copy(target.ctypes.data, host)
    host[:] = 0  # the caller may change it at once
    device.finish()
    np.testing.assert_array_equal(target, kept)


def test_arrays_of_any_shape_and_of_a_read_only_file() -> None:
    device = LateDevice()
    host = np.arange(3 * 50, dtype=np.float16).reshape(3, 50)
    host.flags.writeable = False
    target = np.zeros_like(host)
    staging = Staging(device, device, lambda: None, chunk=64)
    staging.copy(target.ctypes.data, host)
    device.finish()
    np.testing.assert_array_equal(target, host)


def test_an_error_of_a_thread_is_the_callers() -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        Staging(LateDevice(), LateDevice(), fail, chunk=64).copy(0, np.zeros(200, np.uint8))
