"""How calls are timed, and this machine's own ceilings: a large matrix product, and copies of any size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ...engine import Tensor, capture
from ...engine import functional as F
from ...engine.backend import Backend
from ...engine.dtype import DType, float32

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


@dataclass(frozen=True, slots=True)
class Ceilings:
    """FLOP/s of a large matrix product, bytes/s of a large copy, and of a copy that reads and writes so many bytes.

    On the CPU a large copy is slower than a cached one, because the system allocates its memory each time. There it
    is the best copy of any size.
    """

    flops: float
    bandwidth: float
    copy: Callable[[int], float]


def ceilings(backend: Backend, dtype: DType) -> Ceilings:
    """Measures now, with products in `dtype`; a copy of another size once, on demand."""
    n, sizes = (8192, (31,)) if backend.kernels is not None else (1024, range(20, 28))
    copy = lru_cache(maxsize=None)(partial(_copy, backend))
    return Ceilings(_product(backend, n, dtype), max(copy(1 << size) for size in sizes), copy)


def _product(backend: Backend, n: int, dtype: DType) -> float:
    rng = np.random.default_rng(0)
    a, b = (Tensor(backend.to_device(rng.standard_normal((n, n), np.float32)).astype(dtype)) for _ in range(2))
    return 2.0 * n**3 / _least([lambda: F.matmul(a, b)], backend)


def _copy(backend: Backend, moved: int) -> float:
    """Copies half of `moved` bytes beyond the cache: few bytes go slower than many, for a kernel as for this."""
    half = max(4, moved // 2)
    sources = [Tensor(backend.empty((half // 4,), float32)) for _ in range(turns(half, backend))]
    for source in sources:
        source.fill_(1.0)
    # negated, which is a kernel of ours: a copy in a captured graph is slower
    return 2.0 * half / _least([partial(F.neg, source) for source in sources], backend)


def _least(calls: Sequence[Callable[[], object]], backend: Backend) -> float:
    """Seconds a call; on the CPU the least of some times, since other programs take their part of each."""
    return min(seconds(calls, backend) for _ in range(1 if backend.kernels is not None else 3))
