"""Which of several ways to do the same is the fastest here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

_ROUNDS = 7
_FLUSH_BYTES, _FLUSH_SECONDS = 128 << 20, 30e-6  # somewhat less than an H200 takes to fill them
_WORTH = 0.97  # of the first one's time: less would be noise, and the first is what the library advises


class Stopwatch:
    """Times work on the device's stream, each call with nothing of its operands left in the caches."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cupy, self._stream = cupy, stream

    def fastest(self, ways: Sequence[Callable[[], None]]) -> int:
        """The index of the fastest; the first unless another is clearly faster. Waits for the device."""
        if len(ways) < 2:
            return 0
        times = [statistics.median(t) for t in self._times(ways)]
        best = min(range(len(ways)), key=times.__getitem__)
        return best if times[best] < _WORTH * times[0] else 0

    def _times(self, ways: Sequence[Callable[[], None]]) -> list[list[float]]:
        """Milliseconds, in turns, so that a change of the clock rate meets all alike.

        The fills before each call empty the caches, and keep the device busy for twice as long as the host takes to
        queue all that the call launches, or what is timed would be the host.
        """
        flush = self._cupy.empty(_FLUSH_BYTES, "uint8")
        for way in ways:
            way()
        fills = [1 + int(2 * _host_seconds(way) / _FLUSH_SECONDS) for way in ways]
        marks: list[tuple[int, Any, Any]] = []
        for _ in range(_ROUNDS):
            for i, way in enumerate(ways):
                begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
                for _ in range(fills[i]):
                    flush.fill(0)
                begin.record(self._stream)
                way()
                end.record(self._stream)
                marks.append((i, begin, end))
        self._stream.synchronize()
        found: list[list[float]] = [[] for _ in ways]
        for i, begin, end in marks:
            found[i].append(self._cupy.cuda.get_elapsed_time(begin, end))
        return found


def _host_seconds(way: Callable[[], None]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin
