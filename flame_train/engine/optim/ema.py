"""A moving average of the trained values, which varies less than the values of any single step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtype import Array, float32
from ..namespace import Namespace
from .flat_parameters import FlatParameters
from .transform import State


@dataclass(frozen=True, slots=True)
class EMA:
    """After each update mean -= (1 - d) * (mean - values), d = min(decay, (1 + n) / (10 + n)) after n earlier updates.

    After the first update the mean is the values. As diffusers' `EMAModel`; a skipped step leaves the mean as it was.
    Raises ValueError for a decay that is not between 0 and 1.
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"moving average: expected a decay between 0 and 1, got {self.decay}")

    def init(self, arena: FlatParameters) -> State:
        return {"values": arena.values.copy()}

    def rate(self, xp: Namespace, apply: Array, count: Array) -> Array:
        """1 - d for the update after `count` earlier ones: 0-d fp32, 0 unless `apply`."""
        n = count.astype(np.float64)
        kept = xp.where(count == 0, 0.0, xp.minimum(self.decay, (1.0 + n) / (10.0 + n)))
        return xp.where(apply, 1.0 - kept, 0.0).astype(float32)

    @staticmethod
    def update(arena: FlatParameters, state: State, rate: Array) -> None:
        """Moves the mean. With a rate of 0 no bit changes, because the values are finite."""
        mean = state["values"]
        mean -= rate * (mean - arena.values)
