"""How calls are timed, this machine's own ceilings, and the time of a captured step by kind of kernel.

The latter captures the step once more for each kind, with the kernels of that kind only, on the data of the last whole
step. Skipping one kind instead would mislead: the others would run on zeros, draw less power and clock higher. Kernels
whose results others use as indices (random numbers, timesteps) have no kind and always run.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

from flame_train.engine import Tensor, capture
from flame_train.engine import functional as F
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import DType, float32

KINDS: Final = (
    ("attention", r"^attention|^short_kv|sdpa|flash|fmha"),
    ("convolution", r"conv|fprop|dgrad|wgrad|implicit"),
    ("matrix products", r"^matrix product$|^paired_product|gemm|nvjet|cutlass|splitK|cublas"),
    ("LoRA factor gradients", r"^lora_gradients"),
    ("norms and other rows", r"^rows$|^group_norm"),
    ("elementwise", r"^elementwise$"),
    ("sums", r"^columns$|^stretches$"),
    ("update", r"^(squares|scalars|adamw|sgd)$"),
    ("copies and fills", r"^mem(cpy|set)"),
    ("CuPy's own", r"^cupy_|\bcub::"),
)
"""(kind, what its names are like): names of launches, and of kernels as a profiler has them. The first that fits."""

ABOUT_THE_REST: Final = (
    "the step's time less that of the kinds, which are timed apart: below 0 where they take longer alone than "
    "together; CuPy's own kernels are in its time and not among its launches"
)


def kind_of(name: str) -> str:
    """Returns the kind of a launch by its name, "" if it has none of the listed."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "")


def count_launches(step: Callable[[], None], backend: Backend) -> dict[str, tuple[int, int]]:
    """Returns (launches, bytes) of an eager step by kind. Bytes are those of our kernels' arrays, each counted once."""
    launches, moved = defaultdict[str, int](int), defaultdict[str, int](int)

    def watch(name: str, args: Sequence[Any]) -> bool:
        launches[kind_of(name)] += 1
        moved[kind_of(name)] += sum(_touched(a) for a in args if getattr(a, "ndim", 0))
        return True

    with backend.kernels.launch_hooks.hooked(watch):
        step()
    return {kind: (launches[kind], moved[kind]) for kind in launches}


def breakdown(
    step: Callable[[], None],
    backend: Backend,
    counted: Mapping[str, tuple[int, int]],
    flops: Mapping[str, float],
    ceilings: tuple[float, float],
    milliseconds: Callable[[Callable[[], None]], float],
) -> list[dict[str, Any]]:
    """Returns the time of a captured step by kind of kernel.

    The step runs once more for each kind, with the kernels of that kind only. Its numbers mean nothing here.

    Args:
        step: runs one training step.
        counted: (launches, bytes) by kind, as `count_launches` returns them.
        flops: FLOP by kind, where they are counted.
        ceilings: the best FLOP/s and bytes/s of this machine.
        milliseconds: times a replay.

    Returns:
        A row for each kind: launches, milliseconds, and the roofline's milliseconds if there is one.
    """

    def time_of(kinds: Collection[str]) -> float:
        with backend.kernels.launch_hooks.hooked(lambda name, _: kind_of(name) in kinds):
            replay = capture(step, backend.name)
            replay()
            replay()
        return milliseconds(replay)

    whole, none = time_of({"", *counted}), time_of({""})
    found = {kind: time_of({"", kind}) - none for kind in counted if kind}
    rows = []
    for kind, ms in sorted(found.items(), key=lambda item: -item[1]):
        launches, moved = counted[kind]
        floor = max(flops.get(kind, 0.0) / ceilings[0], moved / ceilings[1]) * 1e3
        rows.append({"kind": kind, "launches": launches, "ms": round(ms, 3), "floor_ms": round(floor, 3)})
    rest = {"kind": "the rest", "launches": counted.get("", (0, 0))[0], "ms": round(whole - sum(found.values()), 3)}
    return [*rows, rest | {"floor_ms": 0.0}]


def _touched(array: Any) -> int:
    """Returns the bytes of an array, of what is broadcast once."""
    return int(math.prod(n for n, s in zip(array.shape, array.strides, strict=True) if s) * array.itemsize)


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
