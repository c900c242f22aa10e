"""Finds the fastest of several candidates for the same work, by timing them on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .tuning import SM_90, Tuning

_ROUNDS = 7
_FLUSH_BYTES = 128 << 20  # a fill
_WORTH = 0.97  # of the first candidate's time, which the library suggests: a smaller gain may be noise
_HOPELESS, _CERTAIN_MS = 4, 1.0  # candidates that take this many times the shortest, and this long, are timed only once


class Autotuner:
    """Times work on the device's stream, with caches that hold nothing of a call's operands."""

    def __init__(self, cupy: Any, stream: Any, tuning: Tuning = SM_90) -> None:
        self._flush_seconds = tuning.flush_seconds
        self._cupy, self._stream = cupy, stream

    def fastest(self, candidates: Sequence[Callable[[], None]]) -> int:
        """The index of the fastest; 0 unless another is clearly faster. Waits for the device."""
        if len(candidates) < 2:
            return 0
        times = [statistics.median(t) for t in self._times(candidates)]
        best = min(range(len(candidates)), key=times.__getitem__)
        return best if times[best] < _WORTH * times[0] else 0

    def _times(self, candidates: Sequence[Callable[[], None]]) -> list[list[float]]:
        """Each candidate's times in ms; a single one for candidates that are hopelessly slow.

        The candidates take turns, so that a change of the clock rate affects all alike. Fills before each call flush
        the caches. They also keep the device busy for twice as long as the host takes to queue the call's launches.
        Otherwise the host's time would be measured.
        """
        flush = self._cupy.empty(_FLUSH_BYTES, "uint8")
        for candidate in candidates:
            candidate()
        queued, found = [], []
        for candidate in candidates:
            seconds, marks = self._marked(candidate)
            self._stream.synchronize()
            queued.append(seconds)
            found.append([self._cupy.cuda.get_elapsed_time(*marks)])
        limit = max(_CERTAIN_MS, _HOPELESS * min(ms for (ms,) in found))
        hopeful = [i for i, (ms,) in enumerate(found) if ms <= limit]
        turns = []
        for _ in range(_ROUNDS):
            for i in hopeful:
                for _ in range(1 + int(2 * queued[i] / self._flush_seconds)):
                    flush.fill(0)
                turns.append((i, self._marked(candidates[i])[1]))
        self._stream.synchronize()
        for i in hopeful:
            found[i] = [self._cupy.cuda.get_elapsed_time(*marks) for turn, marks in turns if turn == i]
        return found

    def _marked(self, candidate: Callable[[], None]) -> tuple[float, tuple[Any, Any]]:
        """The seconds the host takes to queue `candidate`, and events before and after it."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        start = time.perf_counter()
        candidate()
        seconds = time.perf_counter() - start
        end.record(self._stream)
        return seconds, (begin, end)
