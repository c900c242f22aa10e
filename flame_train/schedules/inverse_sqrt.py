"""A decay by the inverse square root of the steps, as transformers' `get_inverse_sqrt_schedule`."""

from __future__ import annotations

from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind
from flame_train.settings import field

_TIMESCALE = 10_000  # transformers', where there is no warm-up


class InverseSqrt(ScheduleKind):
    name = "inverse_sqrt"
    same_prefix = True

    timescale: int = field(
        0,
        "steps after the warm-up until the rate is 1 / sqrt 2 of its peak; 0: the warm-up's, 10000 without one",
        unit="steps",
        ge=0,
        aka=("lr_scheduler_timescale",),
    )

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        return Schedule("inverse_sqrt", total, warmup, min_lr=min_lr, timescale=self.timescale or warmup or _TIMESCALE)
