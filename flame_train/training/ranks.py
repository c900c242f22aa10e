"""Which of several processes this one is, and the one call in which they add up their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flame_train.engine.dtype import Array


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world` processes that train together. A single process does nothing here."""

    rank: int = 0
    world: int = 1

    def sum_gradients(self, gradients: Array) -> None:
        """Makes the flat gradient the sum over all ranks, in place, between backward pass and update."""


ALONE: Final = Ranks()
