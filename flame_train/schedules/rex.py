"""REX, reflected exponential decay: a rate that falls late (arXiv 2107.04197)."""

from __future__ import annotations

from flame_train.engine.dtype import Array
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind
from flame_train.settings import field


class Rex(ScheduleKind):
    """(1 - z) / (1 - d + d (1 - z)) at progress z. The paper's d is 1/2; OneTrainer's is 0.9, which falls later."""

    name = "rex"

    rex_d: float = field(0.5, "how late REX falls; 0: linear", ge=0, lt=1)

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        def factor(xp: Namespace, progress: Array) -> Array:
            remaining = 1.0 - progress
            return remaining / ((1.0 - self.rex_d) + self.rex_d * remaining)

        return Schedule(factor, total, warmup, min_lr=min_lr)
