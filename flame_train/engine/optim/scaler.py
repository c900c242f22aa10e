"""Loss scaling for fp16, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtype import Array
from ..namespace import Namespace
from .validation import check


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
        """`scale` (0-d fp32) and `clean`, the clean steps since the scale last changed (0-d int64)."""
        return {"scale": xp.full((), self.init, np.float32), "clean": xp.zeros((), np.int64)}

    def update(self, xp: Namespace, state: dict[str, Array], finite: Array) -> tuple[dict[str, Array], Array]:
        """The state after a step that was `finite` (0-d bool) or not, and whether the scaler is exhausted."""
        scale, clean = state["scale"], state["clean"] + 1
        if not self.dynamic:
            return {"scale": scale, "clean": clean}, ~finite
        due = clean >= self.interval
        grown = scale * np.float32(self.growth)
        up = xp.where(due & xp.isfinite(grown), grown, scale)
        down = xp.maximum(scale * np.float32(self.backoff), np.float32(self.minimum))
        exhausted = ~finite & (scale <= np.float32(self.minimum))
        return {"scale": xp.where(finite, up, down), "clean": xp.where(finite & ~due, clean, 0)}, exhausted
