"""What a backend is: memory, copies and a clock, never an op.

Adding an op does not touch this page. Ops find their kernels by the backend's name and fall back to their
reference on `xp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ..dtype import Array, DType


def same_place(a: Array | None, b: Array) -> bool:
    """Whether two arrays are the same elements of the same memory."""
    if a is None or a.shape != b.shape or a.dtype != b.dtype or _address(a) != _address(b):
        return False
    return all(s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True) if n > 1)


def owner(array: Array) -> Array:
    """The array that owns the memory a view looks into."""
    while isinstance(array.base, type(array)):
        array = array.base
    return array


def extent(array: Array) -> tuple[int, int]:
    """Where in memory an array begins and ends, in bytes."""
    if not array.size:
        return 0, 0
    reach = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    begin = _address(array)
    return begin + sum(r for r in reach if r < 0), begin + sum(r for r in reach if r > 0) + array.dtype.itemsize


def _address(a: Array) -> int:
    return int(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use by this process's arrays now, the most ever since the last reset, and the device's size.

    `peak` is None where that cannot be told.
    """

    live: int
    peak: int | None
    total: int


class Parcel(Protocol):
    """Arrays on their way to a device."""

    def open(self) -> Mapping[str, Array]:
        """The arrays on the device. Work queued from now on waits for their arrival."""

    def release(self) -> None:
        """Says that what is queued so far was all that reads them: their memory may be used again after it."""


class Mailbox(Protocol):
    """Sends arrays to a device beside other work. One thread may send while another opens what came."""

    def send(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Parcel:
        """Starts copying; the host arrays may be changed as soon as this returns."""


class Backend(Protocol):
    """A place where arrays live."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def xp(self) -> ModuleType:
        """The array namespace: numpy or cupy."""

    @property
    def references(self) -> Any:
        """The namespace that references and their formulas are given: `xp`, its products capturable."""

    @property
    def kernels(self) -> Any:
        """What kernel launchers receive as `k`; None on a backend that has only references."""

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before the device has done what they ask for."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """An uninitialised array."""

    def put(self, host: np.ndarray[Any, Any]) -> Array:
        """A copy of a host array on this device, same dtype and memory order."""

    def get(self, array: Array) -> np.ndarray[Any, Any]:
        """The array on the host: the only host read. Raises RuntimeError while a step is captured."""

    def fetch(self, array: Array) -> Callable[[], np.ndarray[Any, Any]]:
        """Starts copying the array to the host. Calling the result waits for that copy, not for later work."""

    def park(self, array: Array) -> Callable[[], Array]:
        """Copies the array to host memory, in order with other work; the result, as often as it is called, brings it
        back as a new array on this device. A captured step may do both."""

    def write(self, target: Array, host: np.ndarray[Any, Any]) -> None:
        """Copies host values into an existing array of the same shape and dtype, in order with other work."""

    def mailbox(self) -> Mailbox:
        """A new way of sending arrays beside other work."""

    def synchronize(self) -> None:
        """Waits until the device has done everything asked of it."""

    def join(self) -> None:
        """What is asked from now on comes after all that was asked, work beside the main line included."""

    def memory(self) -> Memory:
        """Bytes in use, peak and total."""

    def reset_peak(self) -> None:
        """Starts the peak anew."""

    def release_unused(self) -> None:
        """Gives the memory of freed arrays back to the device, for others to take."""

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """`fn` as one replayable device program, or `fn` itself where there is none."""
