"""The validations of a run: when one is due, which was the best, and when patience ends the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from flame_train.config.repeated import ValidationSection

from .validate import ValidationLoss

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """The lowest loss so far, its step, and how many validations came after it; checkpoints hold it."""

    loss: float | None = None
    step: int = 0
    since: int = 0

    @classmethod
    def read(cls, kept: Any) -> EarlyStopping:
        """The standing that a checkpoint holds as JSON; a fresh one if it holds none."""
        return cls(**kept) if isinstance(kept, dict) and kept.keys() == asdict(cls()).keys() else cls()

    def after(self, step: int, loss: float) -> EarlyStopping:
        """The standing after one more validation. A loss that is no number is never the best."""
        if self.loss is None or loss < self.loss:
            return EarlyStopping(loss if loss == loss else None, step)
        return replace(self, since=self.since + 1)


class Validation:
    """The validations of one run. Of several processes each measures its share, and all learn the same loss."""

    def __init__(
        self,
        section: ValidationSection | None = None,
        measure: Callable[[], ValidationLoss] | None = None,
        standing: EarlyStopping | None = None,
    ) -> None:
        """The validations after those that `standing` is of.

        Args:
            section: the `[validation]` section; None: there are no validations.
            measure: measures the loss; None: nothing is held out.
            standing: of the run so far.
        """
        self._section, self._measure = section, measure
        self.standing = standing or EarlyStopping()

    def is_due(self, step: int, epoch: Callable[[int], float]) -> bool:
        """Whether one is due after `step`."""
        return self._section is not None and self._measure is not None and self._section.is_due(step, epoch)

    def at(self, step: int) -> Mapping[str, Any]:
        """Measures after `step`. Returns what the log says of it."""
        assert self._measure is not None
        found = self._measure()
        self.standing = self.standing.after(step, found.loss)
        best = self.standing.loss
        _LOG.info(
            "validation after step %d: loss %.4g (best %.4g after step %d), %.1f s",
            *(step, found.loss, math.nan if best is None else best, self.standing.step, found.seconds),
        )
        return {
            "loss": found.loss,
            "bands": dict(found.bands),
            "seconds": round(found.seconds, 3),
            "best": {"step": self.standing.step, "loss": self.standing.loss},
        }

    def is_best(self, step: int) -> bool:
        """Whether the validation after `step` was the best so far."""
        return self.standing.loss is not None and self.standing.step == step

    @property
    def farewell(self) -> str:
        """What a run says that patience has ended."""
        best = self.standing
        return (
            f"validation.patience: {best.since} validations brought no lower loss than {best.loss:.4g} after step "
            f"{best.step}, whose checkpoint is kept; the run is done"
        )

    @property
    def over(self) -> bool:
        """Whether patience is at its end, and the run with it."""
        patience = self._section.patience if self._section is not None and self._measure is not None else 0
        return 0 < patience <= self.standing.since
