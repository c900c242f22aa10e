"""Losses that a config can choose: each is one file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import LossKind, NoiseLevel

LOSSES: Table[LossKind] = Table("kind", "loss function", entries_in(__name__, LossKind), "mse", aka=("loss_type",))

__all__ = ["LOSSES", "LossKind", "NoiseLevel"]
