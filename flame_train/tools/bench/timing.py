"""How calls are timed: many in one captured graph, taking turns over arguments that no cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flame_train.engine import capture
from flame_train.engine.backend import Backend

_ROUNDS, _TARGET_S = 5, 0.02
_BEYOND_CACHE, _SETS = 1 << 28, 24  # bytes that no GPU's cache holds; copies of the arguments at most


def turns(size: int, backend: Backend) -> int:
    """How many copies of arguments of `size` bytes it takes for one to be gone from the cache when its turn comes."""
    return min(_SETS, -(-_BEYOND_CACHE // max(size, 1))) if backend.kernels is not None else 1


def seconds(calls: Sequence[Callable[[], Any]], backend: Backend, captured: bool = True) -> float:
    """Seconds a call, the median of some rounds; on a GPU many calls are one captured graph, so gaps do not count.

    The calls take turns, and a round's results are kept until its end. Raises RuntimeError for what is to be captured
    and cannot be, such as a read back to the host.
    """
    calls[0]()
    backend.synchronize()
    begin = time.perf_counter()
    calls[0]()
    backend.synchronize()
    repeats = max(1, min(50, int(_TARGET_S / max(time.perf_counter() - begin, 1e-6))))

    def many() -> None:
        kept = [calls[i % len(calls)]() for i in range(repeats)]
        del kept

    whole = capture(many, backend.name) if captured else many
    whole()
    times = list(_rounds(whole, backend))
    return statistics.median(times) / repeats


def _rounds(fn: Callable[[], None], backend: Backend) -> Iterator[float]:
    fn()
    for _ in range(_ROUNDS):
        backend.synchronize()
        begin = time.perf_counter()
        fn()
        backend.synchronize()
        yield time.perf_counter() - begin
