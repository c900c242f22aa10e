"""Which of many arrays hold NaN or infinity: marked on their device, and read back once at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...backend.base import Backend
from ...dtype import Array, compute_dtype
from ..common.conditions import AT_MOST_FP32

_THREADS, _PACKET, _BLOCKS = 256, 16, 8  # a block's threads, bytes for each at a time, blocks to a multiprocessor


class NonFiniteFlags:
    """A mark for each of up to `most` arrays."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend = backend
        self._marks = backend.to_device(np.zeros(most, np.int32))

    def check(self, place: int, x: Array) -> None:
        """Marks number `place` if an element of `x` is not finite. `x` must be dense, in any order of dims."""
        mark, k = self._marks[place : place + 1], self._backend.kernels
        if k is None or x.dtype not in AT_MOST_FP32:
            mark |= ~self._backend.xp.isfinite(x.astype(compute_dtype(x.dtype), copy=False)).all()
        elif x.size:
            blocks = min(-(-x.nbytes // (_THREADS * _PACKET)), _BLOCKS * k.multiprocessors)
            args = (x, mark, np.int64(x.size))
            k.launch_header("ops/reduction/finite.cuh", "mark_broken", {"T": x.dtype}, (blocks,), _THREADS, args)

    def places(self) -> Sequence[int]:
        """The numbers that are marked. Waits for the device."""
        found: Sequence[int] = np.flatnonzero(self._backend.to_host(self._marks)).tolist()
        return found
