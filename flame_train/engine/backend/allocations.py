"""The most bytes that Python and NumPy had allocated at once while something ran, by tracemalloc."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


class Allocations:
    """Watches the process's allocations, in blocks that may lie in one another.

    What was allocated before tracing began and is freed inside is not subtracted. A peak that other code had
    tracemalloc note is lost.
    """

    def __init__(self) -> None:
        self._open = 0
        self._most = 0  # of blocks that have ended inside those that are open
        self._started = False

    def watch(self) -> Callable[[], int]:
        """Begins a block. The result ends it, and says how many bytes more than at its beginning were taken at once."""
        if self._open == 0:
            self._started = not tracemalloc.is_tracing()
            if self._started:
                tracemalloc.start()
        before, peak = tracemalloc.get_traced_memory()
        outer = max(self._most, peak)
        self._open, self._most = self._open + 1, 0
        tracemalloc.reset_peak()

        def end() -> int:
            most = max(self._most, tracemalloc.get_traced_memory()[1])
            self._open, self._most = self._open - 1, max(outer, most)
            if self._open == 0:
                self._most = 0
                if self._started:
                    tracemalloc.stop()
            return most - before

        return end
