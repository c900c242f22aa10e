"""Arrays that wait in host memory for good, once for all processes of a machine that load the same."""

from __future__ import annotations

from ..dtype import Array, HostBytes
from ..mode import mode
from .base import Backend, Offloaded


class KeptArrays:
    """Arrays of bytes by number. Where processes share memory, each array is kept by one of them and used by all."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._shared = backend, None if backend.described else mode().shared
        self._held = dict[int, Offloaded]()
        self._elsewhere = dict[int, HostBytes]()

    def is_own(self, number: int) -> bool:
        """Tells whether this process keeps the array of that number."""
        return self._shared is None or number % self._shared.count == self._shared.number

    def add(self, number: int, array: Array) -> None:
        """Keeps an array, or expects it from the process whose it is: only its size counts then."""
        if self._shared is None:
            self._held[number] = self._backend.offload(array, keep=True)
            return
        place = self._shared.place(int(array.nbytes), self.is_own(number))
        if self.is_own(number):
            self._held[number] = self._backend.keep_in(place, array)
        else:
            self._elsewhere[number] = place

    def complete(self) -> None:
        """Waits for the arrays of the other processes."""
        if self._shared is None:
            return
        self._backend.synchronize()
        self._shared.complete()
        for number, place in self._elsewhere.items():
            self._held[number] = self._backend.keep_in(place, None)
        self._elsewhere.clear()

    def __getitem__(self, number: int) -> Offloaded:
        return self._held[number]
