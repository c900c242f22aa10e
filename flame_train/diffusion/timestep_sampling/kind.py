"""What a timestep sampling is to an objective: how noise levels are drawn."""

from __future__ import annotations

from enum import IntEnum

from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import Entry


class Stream(IntEnum):
    """The random streams of a training step."""

    NOISE = 16
    TIMESTEPS = 17
    OFFSET = 18


class TimestepSampling(Entry):
    """One distribution of noise levels: its fields are keys of `[loss]`."""

    def levels(self, rng: Rng) -> Array:
        """(B,) in (0, 1): noise levels of a flow before the shift, 1 being pure noise."""
        raise NotImplementedError

    @classmethod
    def serves(cls, flow: bool) -> bool:
        """Whether models that predict a velocity (`flow`), or the others, can be trained with it."""
        return flow
