"""Learning rate as a function of the number of updates done, computed on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..dtype import Array
from ..namespace import Namespace
from .transform import check

Name = Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial", "inverse_sqrt"]

_ENDLESS = ("constant", "inverse_sqrt")
"""The schedules whose rate does not depend on `total`."""

Decay = Callable[[Any, Array], Array]
"""(namespace, progress of the decay from 0 to 1, 0-d fp64) -> the share of the peak above `min_lr`, 0-d fp64."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A linear rise from 0 over `warmup` updates, then a decay to `min_lr` at update `total`, then `min_lr`.

    The formulas are those of transformers' get_constant_with_warmup, get_linear, get_cosine (half a cosine),
    get_cosine_with_hard_restarts, get_polynomial_decay and get_inverse_sqrt schedules. Update number 0 of a warm-up has
    rate 0, as there. `min_lr` lifts every decay as get_cosine_with_min_lr does: min_lr + (peak - min_lr) * factor.
    The inverse square root comes near `min_lr` without end.
    """

    name: Name | Decay = "constant"
    total: int = 0
    """Updates until the decay ends."""
    warmup: int = 0
    """Updates of the rise."""
    _: KW_ONLY
    cycles: int = 1
    """How often cosine_restarts starts."""
    power: float = 1.0
    """The exponent of polynomial."""
    min_lr: float = 0.0
    timescale: int = 10_000
    """Updates after which inverse_sqrt has fallen to 1 / sqrt 2."""
    begins: int = 0
    """The number of updates done when it begins: an optimizer that was trained before goes on counting."""

    def __post_init__(self) -> None:
        if not callable(self.name) and self.name not in get_args(Name):
            raise ValueError(f"schedule: no schedule named {self.name!r}")
        check("schedule", warmup=self.warmup, min_lr=self.min_lr, power=self.power)
        check("schedule", least=0, begins=self.begins)
        check("schedule", least=1, cycles=self.cycles, timescale=self.timescale)
        if self.name not in _ENDLESS and self.total <= 0:
            raise ValueError(f"schedule {self.name!r}: expected the number of updates as total, got {self.total}")

    def rate(self, xp: Namespace, count: Array, peak: Array) -> Array:
        """Returns the fp64 learning rate of update number `count` (0-d int64, from 0) for a 0-d fp64 `peak`."""
        done = count.astype(np.float64) - self.begins
        floor = peak if self.name == "constant" else self.min_lr
        left = max(1, self.total - self.warmup)
        decayed = floor + (peak - floor) * self._factor(xp, done - self.warmup, left)
        return xp.where(done < self.warmup, peak * done / max(1, self.warmup), decayed)

    def _factor(self, xp: Namespace, since: Array, left: int) -> Array:
        """Falls from 1 at the start of the decay to 0 at its end, `left` updates after; `since` follow the warm-up."""
        if self.name == "inverse_sqrt":
            return xp.sqrt(self.timescale / (self.timescale + xp.maximum(since, 0.0)))
        progress = xp.clip(since / left, 0.0, 1.0)
        if callable(self.name):
            return self.name(xp, progress)
        if self.name == "cosine":
            return 0.5 * (1.0 + xp.cos(math.pi * progress))
        if self.name == "cosine_restarts":
            wave = 0.5 * (1.0 + xp.cos(math.pi * ((self.cycles * progress) % 1.0)))
            return xp.where(progress >= 1.0, 0.0, wave)
        return (1.0 - progress) ** (self.power if self.name == "polynomial" else 1.0)
