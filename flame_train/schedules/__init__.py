"""Learning-rate schedules that a config can choose: each is one file of this folder."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from flame_train.engine.optim import Schedule
from flame_train.settings import Entry, Table, entries_in


class ScheduleKind(Entry):
    """One shape of the learning rate after the warm-up: its fields are keys of `[schedule]`."""

    same_prefix: ClassVar[bool] = False
    """Whether the rate of a step does not depend on the number of steps, so that a run may be prolonged."""

    decays: ClassVar[bool] = True
    """Whether the rate falls, so that `schedule.min_lr` means something."""

    @abstractmethod
    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        """Returns the schedule of `total` updates, `warmup` of them a linear rise from 0, with a decay to `min_lr`."""


SCHEDULES: Table[ScheduleKind] = Table(
    "name",
    "shape after the warm-up",
    entries_in(__name__, ScheduleKind),
    "cosine",
    aka=("lr_scheduler", "lr_scheduler_type"),
)
