"""Warmup-stable-decay (arXiv 2404.06395), as transformers' `get_wsd_schedule`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from flame_train.engine.dtype import Array
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind
from flame_train.settings import field


class WarmupStableDecay(ScheduleKind):
    """The peak until the last share `decay` of the run, in which the rate falls."""

    name = "warmup_stable_decay"

    decay: float = field(
        0.1, "share of the run, at its end, in which the rate falls", gt=0, le=1, aka=("lr_decay_steps",)
    )
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = field(
        "cosine", "how it falls there; 1-sqrt: 1 minus the root of the progress"
    )

    def problems(self, config: Any) -> Mapping[str, str]:
        total = config.train.steps
        remaining = total - config.schedule.warmup_of(total)
        if self._falling(total) <= remaining:
            return {}
        return {
            "decay": f"expected at most the {remaining} steps that the warm-up leaves, "
            f"got {self.decay:g} of {total} steps"
        }

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        remaining, falling = max(1, total - warmup), self._falling(total)

        def factor(xp: Namespace, progress: Array) -> Array:
            since = xp.floor(progress * remaining + 0.5)  # a whole number: the root of a rounding error would be seen
            return self._fall(xp, xp.clip((since - (remaining - falling)) / falling, 0.0, 1.0))

        return Schedule(factor, total, warmup, min_lr=min_lr)

    def _falling(self, total: int) -> int:
        """Returns the number of steps in which the rate falls."""
        return max(1, round(self.decay * total))

    def _fall(self, xp: Namespace, progress: Array) -> Array:
        if self.decay_shape == "cosine":
            return 0.5 * (1.0 + xp.cos(math.pi * progress))
        return 1.0 - (xp.sqrt(progress) if self.decay_shape == "1-sqrt" else progress)
