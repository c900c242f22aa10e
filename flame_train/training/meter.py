"""The figures of a run over its last steps: the smoothed loss, and the time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

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
        """A step with its loss, which took so long."""
        self._add_loss(loss)
        self.seconds = seconds if self.seconds is None else KEPT * self.seconds + (1 - KEPT) * seconds

    @property
    def pace(self) -> str:
        """Steps a second, or seconds a step where that is more than one: as `1.52 it/s` and `2.31 s/it`."""
        if not self.seconds:
            return ""
        return f"{self.seconds:.2f} s/it" if self.seconds > 1 else f"{1 / self.seconds:.2f} it/s"

    def figures(self) -> dict[str, float | None]:
        """The means for the status of a run; None for what no step has told yet."""
        return {"mean_loss": self.loss, "steps_per_s": round(1 / self.seconds, 4) if self.seconds else None}

    def _add_loss(self, loss: float) -> None:
        """An overflow in fp16 passes without a trace."""
        if self.loss is None or not math.isfinite(self.loss):
            self.loss = loss
        elif math.isfinite(loss):
            self.loss = KEPT * self.loss + (1 - KEPT) * loss
