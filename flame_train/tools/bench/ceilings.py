"""This machine's own ceilings: the arithmetic of a large matrix product, and copies of any size by a kernel of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import DType, float32

from .timing import seconds, turns


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
    """Half of `moved` bytes read, from beyond the cache, and half written.

    Few bytes go slower than many: beginning, ending and filling the memory's queues take the same time for both.
    """
    half = max(4, moved // 2)
    sources = [Tensor(backend.empty((half // 4,), float32)) for _ in range(turns(half, backend))]
    for source in sources:
        source.fill_(1.0)
    # negated, which is a kernel of ours: a copy in a captured graph is slower
    return 2.0 * half / _least([partial(F.neg, source) for source in sources], backend)


def _least(calls: Sequence[Callable[[], object]], backend: Backend) -> float:
    """Seconds a call; on the CPU the least of some times, since other programs take their part of each."""
    return min(seconds(calls, backend) for _ in range(1 if backend.kernels is not None else 3))
