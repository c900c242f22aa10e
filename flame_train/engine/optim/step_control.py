"""The part of an optimizer step that computes with single numbers: whether it is taken, its rate, counters and metrics.

Written over 0-d arrays of any namespace, without a Python branch on a value. NumPy and CuPy run it operation by
operation, and on a GPU it is traced into one kernel (`backend/cuda/scalars.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtype import Array, float32
from ..namespace import Namespace
from .ema import EMA
from .scaler import LossScaler
from .schedule import Schedule
from .transform import State

METRICS = ("count", "lr", "grad_norm", "loss_scale", "finite", "healthy", "skipped")
"""What `Optimizer.metrics` holds, in order."""


@dataclass(frozen=True, slots=True)
class StepControl:
    """The rules of a step. Their state is 0-d arrays by name.

    `lr` (fp64) is the schedule's peak. `count` and `skipped` (int64) count the steps taken and not taken. `healthy`
    (bool) says whether the last step did not fail, or with `halt` whether none did: steps are still taken. `scale`
    (fp32) is the loss scale; `clean` (int64) is the scaler's, if there is one.
    """

    schedule: Schedule
    scaler: LossScaler | None
    average: EMA | None
    accumulation: int
    halt: bool

    def state(self, xp: Namespace, lr: float) -> State:
        """The state before the first step."""
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

    def of(self, xp: Namespace, s: State, norm: Array, loss: Array | None) -> tuple[State, State]:
        """The numbers that the pass over the arena needs; and what to write: metrics, then the changed entries of `s`.

        `norm` is that of the divided gradients, fp32. Metrics are written first, as they show some numbers of before.
        """
        finite = xp.isfinite(norm)
        if loss is not None:
            finite = finite & xp.isfinite(loss).all()
        apply = finite & s["healthy"] if self.halt else finite
        lr = self.schedule.rate(xp, s["count"], s["lr"])
        numbers = {"apply": apply, "rate": lr.astype(float32), "divisor": self.divisor(s)}
        if self.average is not None:
            numbers["average"] = self.average.rate(xp, apply, s["count"])
        after = self._after(xp, s, finite, apply)
        shown = s | after | {"lr": lr, "grad_norm": norm, "loss_scale": s["scale"], "finite": finite}
        return numbers, {f"metrics.{name}": shown[name] for name in METRICS} | after

    def _after(self, xp: Namespace, s: State, finite: Array, apply: Array) -> State:
        """The counters, the scaler's state and `healthy` after the step."""
        failed, changed = ~finite, {}
        if self.scaler is not None:
            scaling, failed = self.scaler.update(xp, s, finite)
            changed = {n: xp.where(s["healthy"], new, s[n]) if self.halt else new for n, new in scaling.items()}
        return {
            "count": s["count"] + apply,
            "skipped": s["skipped"] + ~apply,
            "healthy": s["healthy"] & ~failed if self.halt else ~failed,
            **changed,
        }
