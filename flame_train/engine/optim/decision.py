"""What is decided of a step on single numbers: whether it is taken, how far it goes, what is kept for the next.

Written over 0-d arrays of any namespace, without a Python branch on a value: NumPy and CuPy do it operation by
operation, and a GPU's optimizer makes one kernel of it (`backend/cuda/scalars.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtype import Array, float32
from .average import MovingAverage
from .scaler import LossScaler
from .schedule import Schedule
from .transform import State

METRICS = ("count", "lr", "grad_norm", "loss_scale", "finite", "healthy", "skipped")
"""What `Optimizer.metrics` holds, in order."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The rules by which a step goes; their numbers are arrays by name.

    `lr` (fp64) is the schedule's peak, `count` and `skipped` (int64) count steps, `healthy` (bool) says whether the
    last was sound, or with `halt` whether all were and any may still be taken, `scale` (fp32) is the loss's and `clean`
    (int64) the scaler's, where there is one.
    """

    schedule: Schedule
    scaler: LossScaler | None
    average: MovingAverage | None
    accumulation: int
    halt: bool

    def state(self, xp: Any, lr: float) -> State:
        """The numbers before the first step."""
        return {
            "lr": xp.full((), lr, np.float64),
            "count": xp.zeros((), np.int64),
            "skipped": xp.zeros((), np.int64),
            "healthy": xp.ones((), np.bool_),
            **(self.scaler.state(xp) if self.scaler else {"scale": xp.ones((), float32)}),
        }

    @property
    def divides(self) -> bool:
        """Whether gradients are divided by something that may not be 1."""
        return self.scaler is not None or self.accumulation > 1

    def divisor(self, s: State) -> Array:
        """What the accumulated gradients are divided by, fp32."""
        return s["scale"] * np.float32(self.accumulation)

    def of(self, xp: Any, s: State, norm: Array, loss: Array | None) -> tuple[State, State]:
        """The step's numbers for the pass over the arena, and its figures with what `s` becomes, in order of writing.

        `norm` is that of the divided gradients, fp32. The figures come first: they show some numbers as they were.
        """
        finite = xp.isfinite(norm)
        if loss is not None:
            finite = finite & xp.isfinite(loss).all()
        take = finite & s["healthy"] if self.halt else finite
        lr = self.schedule.rate(xp, s["count"], s["lr"])
        numbers = {"take": take, "rate": lr.astype(float32), "divisor": self.divisor(s)}
        if self.average is not None:
            numbers["average"] = self.average.rate(xp, take, s["count"])
        after = self._after(xp, s, finite, take)
        shown = s | after | {"lr": lr, "grad_norm": norm, "loss_scale": s["scale"], "finite": finite}
        return numbers, {f"metrics.{name}": shown[name] for name in METRICS} | after

    def _after(self, xp: Any, s: State, finite: Array, take: Array) -> State:
        """The counters, the scaler and the flag."""
        failed, changed = ~finite, {}
        if self.scaler is not None:
            scaling, failed = self.scaler.update(xp, s, finite)
            changed = {n: xp.where(s["healthy"], new, s[n]) if self.halt else new for n, new in scaling.items()}
        return {
            "count": s["count"] + take,
            "skipped": s["skipped"] + ~take,
            "healthy": s["healthy"] & ~failed if self.halt else ~failed,
            **changed,
        }
