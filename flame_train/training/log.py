"""What a run says on standard error: a bar on a terminal, else a line now and then. It cannot end the run.

Its figures are means over the last steps (`Meter`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from flame_train.progress import Bar, clock, elapsed_and_left, say

from .slow_steps import SlowSteps

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S = 10.0
_MUCH = 0.1  # of a step's time, spent waiting for data
_GIB = 2**30


class Console:
    """A bar on a terminal; elsewhere a line now and then. All of it goes to standard error."""

    def __init__(
        self,
        total: int,
        start: int,
        epochs: float = 0.0,
        silent: bool = False,
        meter: Meter | None = None,
        slow_steps: SlowSteps | None = None,
        weighted: bool = False,
    ) -> None:
        """Shows steps `start` to `total`.

        Args:
            total: the last step.
            start: the step before the first one shown.
            epochs: of the whole run; 0: epochs are not shown.
            silent: whether nothing is shown, because another process shows it.
            meter: has the means, and gets the steps from here.
            slow_steps: gets the times of steps, and says what is wrong with them; None: nobody watches.
            weighted: whether losses are weighted, which their name then says.
        """
        self._total, self._start, self._epochs, self._silent = total, start, epochs, silent
        self._begin: float | None = None  # of the first step; a sample grid before it does not count
        self._last_line = 0.0
        self._blocks = ""  # the gradient norms of blocks when they were last read
        self._record: Mapping[str, Any] = {"step": start}
        self._seconds = 0.0
        self._bar: Bar | None = None
        self.meter = Meter() if meter is None else meter
        self._slow_steps, self._loss = slow_steps, "weighted loss" if weighted else "loss"

    def __enter__(self) -> Self:
        if not self._silent:
            bar = Bar(self._line)
            self._bar = bar if bar.open() else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, record: Mapping[str, Any], seconds: float) -> None:
        """Shows the figures of one step, which took so long."""
        self.meter.add(float(record["loss"]), seconds)
        if self._slow_steps is not None:
            for message in self._slow_steps.add(seconds, record["data_wait_ms"] / 1e3):
                _LOG.warning("step %d: %s", record["step"], message)
        if self._silent:
            return
        if "gradients" in record:
            self._blocks = _extremes(record["gradients"])
        now = time.monotonic()
        if self._begin is None:
            self._begin = now - seconds
        self._record, self._seconds = record, seconds
        due = record["step"] in (self._start + 1, self._total) or now - self._last_line >= _PLAIN_EVERY_S
        if self._bar is None and due:
            self._last_line = now
            elapsed, remaining = self._times(now)
            parts = [
                self._epoch("epoch", 2),
                f"mean {self._loss} {self.meter.loss:.4g}",
                *self._details(),
                self.meter.pace,
            ]
            parts += [self._memory(), self._waits(), f"elapsed {clock(elapsed)}", f"ETA {clock(remaining)}"]
            say(f"step {record['step']}/{self._total}  " + "  ".join(filter(None, parts)))

    def _line(self) -> tuple[str, list[str], float]:
        """Returns what the bar shows: the figures in the order of their worth."""
        step, loss = self._record["step"], self.meter.loss
        before, full = f"{step}/{self._total}", step / self._total if self._total else 1.0
        if self._begin is None or loss is None:
            return before, [], full
        times = elapsed_and_left(*self._times(time.monotonic()))
        parts = [times, f"{self._loss} {loss:.4g}", self.meter.pace, self._epoch("ep", 1), self._memory()]
        return before, [*parts, self._waits(), *self._details()], full

    def _times(self, now: float) -> tuple[float, float]:
        """Returns seconds since the first step began, and those that are left."""
        step, elapsed = self._record["step"], now - (now if self._begin is None else self._begin)
        return elapsed, elapsed / max(step - self._start, 1) * (self._total - step)

    def _epoch(self, name: str, digits: int) -> str:
        epochs = f"{self._epochs:.{digits}f}".removesuffix(".0")
        return f"{name} {self._record['epoch']:.{digits}f}/{epochs}" if self._epochs else ""

    def _details(self) -> list[str]:
        record = self._record
        norm = f"|g| {record['grad_norm']:.3g}{self._blocks}"
        return [f"lr {record['lr']:.2e}", norm, f"{record['images_per_s']:.2f} img/s"]

    def _memory(self) -> str:
        memory = self._record["memory"]
        return "" if memory is None else f"{memory / _GIB:.1f} GiB"

    def _waits(self) -> str:
        wait = self._record["data_wait_ms"]
        return f"waits {wait:.0f} ms for data" if wait > _MUCH * 1e3 * self._seconds else ""


def _extremes(norms: Mapping[str, float]) -> str:
    """Returns the blocks with the least and the largest gradient; NaN counts as the largest."""
    in_order = sorted(norms, key=lambda block: (math.isnan(norms[block]), norms[block]))
    return " (" + ", ".join(f"{norms[b]:.3g} {b}" for b in dict.fromkeys((in_order[0], in_order[-1]))) + ")"


KEPT: Final = 0.95
"""What a step leaves of the mean before it: the mean is over about the last twenty steps."""

REMEMBERED: Final = 200
"""Steps whose losses a mean needs: what came before them counts less than 1 part in 10,000."""


class Meter:
    """Exponential means over the steps of a run. `losses` are those of the steps before, of an earlier process."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self.loss: float | None = None
        self.seconds: float | None = None
        for loss in losses:
            self._add_loss(loss)

    def add(self, loss: float, seconds: float) -> None:
        """Counts a step with its loss, which took so long."""
        self._add_loss(loss)
        self.seconds = seconds if self.seconds is None else KEPT * self.seconds + (1 - KEPT) * seconds

    @property
    def pace(self) -> str:
        """Steps a second, or seconds a step where that is more than one: as `1.52 it/s` and `2.31 s/it`."""
        if not self.seconds:
            return ""
        return f"{self.seconds:.2f} s/it" if self.seconds > 1 else f"{1 / self.seconds:.2f} it/s"

    def figures(self) -> dict[str, float | None]:
        """Returns the means for the status of a run; None for what no step has told yet."""
        return {"mean_loss": self.loss, "steps_per_s": round(1 / self.seconds, 4) if self.seconds else None}

    def _add_loss(self, loss: float) -> None:
        """Counts a loss; an overflow in fp16 passes without a trace."""
        if self.loss is None or not math.isfinite(self.loss):
            self.loss = loss
        elif math.isfinite(loss):
            self.loss = KEPT * self.loss + (1 - KEPT) * loss
