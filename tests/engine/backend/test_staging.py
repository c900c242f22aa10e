"""Copies through pinned buffers, on a device that copies as late as it may."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.staging import Staging
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import SafetensorsFile, save_file


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
    staging.begin(target.ctypes.data, host)()
    host[:] = 0  # the caller may change it at once
    device.finish()
    np.testing.assert_array_equal(target, kept)


def test_arrays_of_any_shape_and_of_a_read_only_file() -> None:
    device = LateDevice()
    host = np.arange(3 * 50, dtype=np.float16).reshape(3, 50)
    host.flags.writeable = False
    target = np.zeros_like(host)
    staging = Staging(device, device, lambda: None, chunk=64)
    staging.begin(target.ctypes.data, host)()
    device.finish()
    np.testing.assert_array_equal(target, host)


def _mapped(tmp_path: Path) -> tuple[Path, np.ndarray[Any, Any], SafetensorsFile]:
    path, values = tmp_path / "a.safetensors", np.random.default_rng(1).standard_normal((3, 5, 700), np.float32)
    save_file(path, {"before": np.zeros(7, np.float16), "x": values, "y": values + 1})
    return path, values, SafetensorsFile(path)


def test_what_a_file_maps_is_read_from_the_file(tmp_path: Path) -> None:
    _, values, file = _mapped(tmp_path)
    device, host = LateDevice(), file.read("y").transpose(0, 2, 1)[1:].transpose(0, 2, 1)
    target = np.zeros_like(values[1:])
    staging = Staging(device, device, lambda: None, chunk=1024)
    staging.begin(target.ctypes.data, host)()
    device.finish()
    np.testing.assert_array_equal(target, values[1:] + 1)


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path: Path) -> None:
    path, values, file = _mapped(tmp_path)
    host = file.read("y")
    os.truncate(path, path.stat().st_size - values.nbytes)
    with pytest.raises(ModelFileError, match=r"a\.safetensors: was cut to \d+ bytes while it was read"):
        Staging(LateDevice(), LateDevice(), lambda: None, chunk=1024).begin(0, host)()


def test_an_error_of_a_thread_is_the_callers() -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        Staging(LateDevice(), LateDevice(), fail, chunk=64).begin(0, np.zeros(200, np.uint8))()
