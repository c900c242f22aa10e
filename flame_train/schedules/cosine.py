"""Cosine decays: half a wave, as transformers' `get_cosine_schedule_with_warmup`, and with hard restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind
from flame_train.settings import field


class Cosine(ScheduleKind):
    name = "cosine"

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        return Schedule("cosine", total, warmup, min_lr=min_lr)


class CosineRestarts(ScheduleKind):
    name = "cosine_restarts"

    cycles: int = field(
        1, "how often the rate falls from the peak", ge=1, aka=("lr_scheduler_num_cycles", "lr_num_cycles")
    )

    def problems(self, config: Any) -> Mapping[str, str]:
        steps = config.train.steps - config.schedule.warmup_of(config.train.steps)
        if self.cycles <= max(steps, 1):
            return {}
        return {"cycles": f"expected at most the {steps} steps that the warm-up leaves, got {self.cycles}"}

    def build(self, total: int, warmup: int, min_lr: float) -> Schedule:
        return Schedule("cosine_restarts", total, warmup, cycles=self.cycles, min_lr=min_lr)
