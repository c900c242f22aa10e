"""The time of a captured step by kind of kernel, compared with the least time on this machine.

It uses no profiler. It captures the step once more for each kind, with the kernels of that kind only. They run on the
data of the last whole step. Skipping one kind instead would mislead: the others would run on zeros, draw less power
and clock higher. Kernels whose results others use as indices (random numbers, timesteps) have no kind and always run.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from flame_train.engine import capture
from flame_train.engine.backend import Backend

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
    """(launches, bytes) of an eager step by kind. Bytes are those of our kernels' arrays, each counted once."""
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
        backend: the CUDA backend.
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
