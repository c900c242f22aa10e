"""A polynomial decay, as transformers' `get_polynomial_decay_schedule_with_warmup`."""

from __future__ import annotations

from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind
from flame_train.settings import field


class Polynomial(ScheduleKind):
    name = "polynomial"

    power: float = field(1.0, "exponent of the decay", gt=0, aka=("lr_scheduler_power",))

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        return Schedule("polynomial", total, warmup, power=self.power, min_lr=min_lr)
