"""Where a captured step's time goes: kernels by kind, and beside each the least time this machine could take."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flame_train.engine.backend import Backend
from flame_train.engine.capture import kernel_times

_KINDS: Final = (
    ("attention", r"sdpa|fmha|flash|attention_|few_keys|compute_dot_do_o|convert_dq"),
    ("convolution", r"implicit_gemm|conv|cask"),
    ("LoRA factor gradients", r"^lora_gradients"),
    ("matrix products", r"nvjet|gemm|cutlass|cublas|splitK"),
    ("norms and other rows", r"^rows$|^group_norm"),
    ("elementwise", r"^elementwise$"),
    ("sums", r"^columns$|^stretches$"),
    ("update", r"^adamw|^squares"),
    ("fills", r"^fill$"),
)


def kind_of(name: str) -> str:
    """The kind of a kernel, "" if it is none of the listed: copies, random numbers, timesteps."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "")


def traffic(step: Callable[[], None], backend: Backend) -> dict[str, float]:
    """The bytes that our own kernels are given in an eager step, by kind: each array once."""
    moved: dict[str, float] = defaultdict(float)

    def watch(name: str, args: Sequence[Any]) -> None:
        moved[kind_of(name)] += sum(_touched(a) for a in args if hasattr(a, "strides"))

    with backend.kernels.watched(watch):
        step()
    return moved


def breakdown(
    replay: Callable[[], None], flops: Mapping[str, float], moved: Mapping[str, float], ceilings: tuple[float, float]
) -> list[dict[str, Any]]:
    """A row a kind: launches, milliseconds, and the floor by the `ceilings`, FLOP/s and bytes/s, where there is one.

    `replay` runs several times, and leaves nothing behind that means something.
    """
    found = sorted(kernel_times(replay, kind_of).items(), key=lambda row: -row[1][1])
    rows = []
    for kind, (launches, ms) in found:
        floor = max(flops.get(kind, 0.0) / ceilings[0], moved.get(kind, 0.0) / ceilings[1]) * 1e3
        row = {"kind": kind or "others, and what runs beside", "launches": launches, "ms": round(ms, 3)}
        rows.append(row | {"floor_ms": round(floor, 3) if kind and floor else None})
    return rows


def _touched(array: Any) -> int:
    """The bytes of an array, of what is broadcast once."""
    return int(math.prod(n for n, s in zip(array.shape, array.strides, strict=True) if s) * array.itemsize)
