"""Optimizers that a config can choose: each is one file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import OptimizerKind

OPTIMIZERS: Table[OptimizerKind] = Table(
    "name", "optimizer", entries_in(__name__, OptimizerKind), "adamw", aka=("optimizer_type",)
)

__all__ = ["OPTIMIZERS", "OptimizerKind"]
