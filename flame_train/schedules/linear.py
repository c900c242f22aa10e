"""A linear decay, as transformers' `get_linear_schedule_with_warmup`."""

from __future__ import annotations

from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind


class Linear(ScheduleKind):
    name = "linear"

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        return Schedule("linear", total, warmup, min_lr=min_lr)
