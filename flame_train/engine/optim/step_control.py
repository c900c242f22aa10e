"""What an optimizer step keeps beside its rule: single numbers (rate, counters, metrics), loss scale, and a mean.

Written over 0-d arrays of any namespace, without a Python branch on a value. NumPy and CuPy run it operation by
operation, and on a GPU it is traced into one kernel (`backend/cuda/scalars.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtype import Array, float32
from ..namespace import Namespace
from .flat_parameters import FlatParameters
from .schedule import Schedule
from .transform import State, check


@dataclass(frozen=True, slots=True)
class EMA:
    """After each update mean -= (1 - d) * (mean - values), d = min(decay, (1 + n) / (10 + n)) after n earlier updates.

    After the first update the mean is the values. As diffusers' `EMAModel`; a skipped step leaves the mean as it was.
    Raises ValueError for a decay that is not between 0 and 1.
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"moving average: expected a decay between 0 and 1, got {self.decay}")

    def init(self, arena: FlatParameters) -> State:
        return {"values": arena.values.copy()}

    def rate(self, xp: Namespace, apply: Array, count: Array) -> Array:
        """Returns 1 - d for the update after `count` earlier ones: 0-d fp32, 0 unless `apply`."""
        n = count.astype(np.float64)
        kept = xp.where(count == 0, 0.0, xp.minimum(self.decay, (1.0 + n) / (10.0 + n)))
        return xp.where(apply, 1.0 - kept, 0.0).astype(float32)

    @staticmethod
    def update(arena: FlatParameters, state: State, rate: Array) -> None:
        """Moves the mean. With a rate of 0 no bit changes, because the values are finite."""
        mean = state["values"]
        mean -= rate * (mean - arena.values)


@dataclass(frozen=True, slots=True)
class LossScaler:
    """torch.amp.GradScaler's defaults and rules, with a floor.

    The scale doubles after `interval` clean steps in a row and halves at an overflow, whose step is skipped.
    An overflow at `minimum` is no longer a matter of scale: it exhausts the scaler, and an optimizer that halts, halts.
    With `dynamic` false the scale stays `init`, and any overflow exhausts the scaler.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0
    dynamic: bool = True

    def __post_init__(self) -> None:
        check("loss scaler", above=0.0, init=self.init, minimum=self.minimum)
        check("loss scaler", above=1.0, growth=self.growth)
        check("loss scaler", above=0.0, below=1.0, backoff=self.backoff)
        check("loss scaler", least=1, interval=self.interval)

    def state(self, xp: Namespace) -> dict[str, Array]:
        """Returns `scale` (0-d fp32) and `clean`, the clean steps since the scale last changed (0-d int64)."""
        return {"scale": xp.full((), self.init, np.float32), "clean": xp.zeros((), np.int64)}

    def update(self, xp: Namespace, state: dict[str, Array], finite: Array) -> tuple[dict[str, Array], Array]:
        """Returns the state after a step that was `finite` (0-d bool) or not, and whether the scaler is exhausted."""
        scale, clean = state["scale"], state["clean"] + 1
        if not self.dynamic:
            return {"scale": scale, "clean": clean}, ~finite
        due = clean >= self.interval
        grown = scale * np.float32(self.growth)
        up = xp.where(due & xp.isfinite(grown), grown, scale)
        down = xp.maximum(scale * np.float32(self.backoff), np.float32(self.minimum))
        exhausted = ~finite & (scale <= np.float32(self.minimum))
        return {"scale": xp.where(finite, up, down), "clean": xp.where(finite & ~due, clean, 0)}, exhausted


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
        """Returns the state before the first step."""
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
        """Returns what the accumulated gradients are divided by, fp32."""
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
        """Returns the counters, the scaler's state and `healthy` after the step."""
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
