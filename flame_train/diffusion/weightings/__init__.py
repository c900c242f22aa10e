"""Weightings of noise levels that a config can choose: each is a class in a file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import Weighting

WEIGHTINGS: Table[Weighting] = Table(
    "weighting", "weight of a noise level in the loss", entries_in(__name__, Weighting), "none"
)

__all__ = ["WEIGHTINGS", "Weighting"]
