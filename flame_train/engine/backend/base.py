"""What a backend is: memory, copies and a clock, never an op.

A backend knows no op, so adding one does not touch this file. Ops run their kernels if the backend has `kernels`, and
else their reference on `references`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ..dtype import Array, DType, HostBytes


def same_place(a: Array | None, b: Array) -> bool:
    """Tells whether two arrays are views of the same elements: equal address, shape, dtype and strides."""
    if a is None or a.shape != b.shape or a.dtype != b.dtype or _address(a) != _address(b):
        return False
    return all(s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True) if n > 1)


def owner(array: Array) -> Array:
    """Returns the array that owns the memory a view looks into."""
    while isinstance(array.base, type(array)):
        array = array.base
    return array


def extent(array: Array) -> tuple[int, int]:
    """Returns the address of an array's first byte and the one after its last; (0, 0) for an empty array."""
    if not array.size:
        return 0, 0
    reach = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    begin = _address(array)
    return begin + sum(r for r in reach if r < 0), begin + sum(r for r in reach if r > 0) + array.dtype.itemsize


def _address(a: Array) -> int:
    return int(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use by this process's arrays now, their peak since the last reset, and the size of the device's memory.

    `peak` is None where the system does not tell it.
    """

    live: int
    peak: int | None
    total: int


class Upload(Protocol):
    """Arrays on their way to a device."""

    def wait(self) -> Mapping[str, Array]:
        """Returns the arrays on the device. Work queued from now on waits for their arrival."""

    def release(self) -> None:
        """Declares that no work queued from now on reads them, so that their memory may be used again."""


class Offloaded(Protocol):
    """An array that waits in host memory."""

    def reload(self) -> Array:
        """Returns a copy in a new array on the device, in order with other work."""

    def fetch(self, out: Array) -> Callable[[], None]:
        """Starts copying into `out`, of the same shape and dtype, once all work queued so far is done.

        Work queued from now on runs meanwhile. After a call of the result, further work waits for the copy.
        """


class Uploader(Protocol):
    """Sends arrays to a device while other work runs. One thread may submit while another waits."""

    def submit(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Upload:
        """Starts copying; the host arrays may be changed as soon as this returns."""


class Backend(Protocol):
    """A place where arrays live."""

    @property
    def name(self) -> str:
        """ "cpu", "cuda", or another GPU by its number: "cuda:1"."""

    @property
    def card(self) -> str:
        """The device as messages name it: "cuda:0 (Tesla T4)"."""

    @property
    def pci_bus_id(self) -> str:
        """The GPU's place in the machine, by which the driver knows it; "" for what is no GPU of this machine."""

    @property
    def xp(self) -> ModuleType:
        """The array namespace: numpy or cupy."""

    @property
    def references(self) -> Any:
        """The namespace that references and formulas get as `xp`: like `xp`, but all of it can be captured."""

    @property
    def kernels(self) -> Any:
        """What kernel launchers get as `k`; None on a backend that has only references."""

    @property
    def described(self) -> bool:
        """Whether its arrays have shapes and no values: those of a GPU that is not there (`shape_run.py`)."""

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before the device has done what they ask for."""

    def enter_thread(self) -> None:
        """Makes the device and its stream those that work of this thread goes to."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """Returns an uninitialised array."""

    def to_device(self, host: np.ndarray[Any, Any]) -> Array:
        """Returns a copy of a host array on this device, same dtype and memory order."""

    def begin_upload(self, host: np.ndarray[Any, Any]) -> Callable[[], Array]:
        """Starts what `to_device` does. A call of the result gives the array; until then `host` must stay as it is."""

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Returns the array on the host: the only host read. Raises RuntimeError while a step is captured."""

    def get_async(self, array: Array) -> Callable[[], np.ndarray[Any, Any]]:
        """Starts copying the array to the host. Calling the result waits for that copy, not for later work."""

    def offload(self, array: Array, *, keep: bool = False) -> Offloaded:
        """Copies the array to host memory, in order with other work. A captured step may do this, and copy it back.

        Raises DeviceFault if the system refuses the memory. With `keep` that is of exactly the array's size, for an
        array that waits for good, and counts in `host_bytes`.
        """

    def keep_in(self, memory: HostBytes, array: Array | None) -> Offloaded:
        """Keeps an array of bytes in host memory that processes share; None: finds there what another one keeps.

        Raises DeviceFault if the system refuses to pin the memory.
        """

    @property
    def host_bytes(self) -> int:
        """The bytes of arrays that wait in host memory for good."""

    @property
    def program(self) -> int:
        """A number that changes wherever a captured step begins or ends.

        What the host knows of the contents of device memory holds for one number alone: a replay finds others.
        """

    def write(self, target: Array, host: np.ndarray[Any, Any]) -> None:
        """Copies host values into an existing array of the same shape and dtype, in order with other work."""

    def uploader(self) -> Uploader:
        """Returns a new uploader, which sends arrays to this device."""

    def synchronize(self) -> None:
        """Waits until the device has done everything requested of it."""

    def wait_side_stream(self) -> None:
        """Orders work queued from now on after all work queued so far, that on a side stream included."""

    def memory(self) -> Memory:
        """Bytes in use, peak and total."""

    def free_memory(self) -> int:
        """Bytes of the device that neither this process nor another has."""

    def limit_memory(self, size: int) -> None:
        """Lets arrays, captured steps and uploads take no more than so many bytes together; 0: all there are."""

    def reset_peak(self) -> None:
        """Makes the memory in use now the peak."""

    def watch_peak(self) -> Callable[[], int]:
        """Begins a block, and returns what ends it: a function that says how many bytes more than at the beginning were
        taken at once. Blocks may lie in one another. On the CPU they slow Python down: for searching, not for training.
        """

    def empty_cache(self) -> None:
        """Gives the memory of freed arrays back to the device: one kind of work is over, and another begins."""

    def run_once(self, fn: Callable[[], None]) -> None:
        """Runs `fn`, of whose arrays none stays. Under a limit it works in the memory that captured steps keep."""

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Returns `fn` as one replayable device program, or `fn` itself where there is none."""
