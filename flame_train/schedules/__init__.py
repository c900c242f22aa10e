"""Learning-rate schedules that a config can choose: each is one file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import ScheduleKind

SCHEDULES: Table[ScheduleKind] = Table(
    "name",
    "shape after the warm-up",
    entries_in(__name__, ScheduleKind),
    "cosine",
    aka=("lr_scheduler", "lr_scheduler_type"),
)

__all__ = ["SCHEDULES", "ScheduleKind"]
