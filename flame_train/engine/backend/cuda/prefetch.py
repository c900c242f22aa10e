"""Arrays sent to the device while other work runs: through pinned memory, on a stream of their own.

Parcels of the same names, shapes and dtypes alternate between two places of memory. A place is filled again only when
the device has done what was queued on the main stream up to the release of the place's last parcel.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...dtype import Array

HostArray = np.ndarray[Any, Any]
_PLACES = 2


class CudaMailbox:
    """Sends from one thread, opens and releases in another."""

    def __init__(self, cupy: ModuleType, main: Any) -> None:
        """For work that is queued on the stream `main`."""
        self._cupy, self._main = cupy, main
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._places: dict[tuple[Any, ...], list[_Place]] = {}

    def send(self, arrays: Mapping[str, HostArray]) -> _Place:
        """Starts copying; returns at once, unless both places of these shapes are still in use."""
        kind = tuple((name, a.shape, a.dtype) for name, a in sorted(arrays.items()))
        places = self._places.setdefault(kind, [])
        if len(places) < _PLACES:
            places.append(_Place(self._cupy, self._main, arrays))
        else:
            places.append(places.pop(0))
        places[-1].fill(arrays, self._stream)
        return places[-1]


class _Place:
    """Pinned memory, device memory, and the events that order their use. It is the parcel (`base.Parcel`) in it."""

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

    def open(self) -> Mapping[str, Array]:
        """The arrays on the device: work queued from now on waits for their arrival."""
        self._main.wait_event(self._arrived)
        return self._device

    def release(self) -> None:
        """Declares that no work queued from now on reads the arrays."""
        self._released.record(self._main)
