"""A moving average of the trained values: what a run hands out may be calmer than its last step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtype import Array, float32
from .arena import Arena
from .transform import State

_THREADS = 256


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """After each update mean -= (1 - d) * (mean - values), with d = min(decay, (1 + n) / (10 + n)) after n others.

    The first update is copied. As diffusers' `EMAModel`; a step that is skipped leaves the mean as it was.
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"moving average: expected a decay between 0 and 1, got {self.decay}")

    def init(self, arena: Arena) -> State:
        return {"values": arena.values.copy()}

    def update(self, arena: Arena, state: State, take: Array, count: Array) -> None:
        """Moves the mean towards the arena's values if `take` (0-d bool); `count` updates (0-d) came before."""
        xp, mean = arena.backend.xp, state["values"]
        n = count.astype(np.float64)
        kept = xp.where(count == 0, 0.0, xp.minimum(self.decay, (1.0 + n) / (10.0 + n)))
        rate = xp.where(take, 1.0 - kept, 0.0).astype(float32)  # of 0 no bit changes, for the values are finite
        k = arena.backend.kernels
        if k is None:
            mean -= rate * (mean - arena.values)
        else:
            k.launch("adamw.cu", "average", float32, (-(-arena.size // _THREADS),), _THREADS,
                     (mean, arena.values, rate, np.int64(arena.size)))  # fmt: skip
