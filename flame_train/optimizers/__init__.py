"""Optimizers that a config can choose: each is one file of this folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from flame_train.engine.optim import Rule
from flame_train.settings import Entry, Table, entries_in


class OptimizerKind(Entry):
    """One optimizer: its fields are further keys of `[optimizer]`."""

    finds_rate: ClassVar[bool] = False
    """Whether it finds the learning rate by itself, and `optimizer.lr` is a factor, 1 as a rule."""

    @property
    def lr_is_factor(self) -> bool:
        """Whether it finds the learning rate with the values that its keys have."""
        return self.finds_rate

    averages: ClassVar[bool] = False
    """Whether it averages the values itself, which takes the place of a decaying schedule and of a moving average."""

    @abstractmethod
    def rule(self) -> Rule:
        """Returns the last transform of the chain, which makes the update from the gradient."""


def betas_problem(betas: Sequence[float], key: str = "betas") -> Mapping[str, str]:
    """Says what is wrong with decays, of which each must be at least 0 and less than 1."""
    if all(0 <= beta < 1 for beta in betas):
        return {}
    return {key: f"expected each >= 0 and < 1, got {list(betas)}"}


def averaging_problem(betas: Sequence[float]) -> Mapping[str, str]:
    """Says what is wrong with decays of which the first puts a share of the average into the trained values."""
    if betas[0] == 0:
        return {"betas": "expected the first above 0, got 0: nothing would be averaged"}
    return betas_problem(betas)


OPTIMIZERS: Table[OptimizerKind] = Table(
    "name", "optimizer", entries_in(__name__, OptimizerKind), "adamw", aka=("optimizer_type",)
)
