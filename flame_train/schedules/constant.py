"""A constant learning rate, as transformers' `get_constant_schedule_with_warmup`."""

from __future__ import annotations

from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind


class Constant(ScheduleKind):
    name = "constant"
    same_prefix = True
    decays = False

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        return Schedule("constant", total, warmup)
