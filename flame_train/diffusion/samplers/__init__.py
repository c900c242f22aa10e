"""Samplers that a config can choose: each is one file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import Path, Sampler

SAMPLERS: Table[Sampler] = Table(
    "sampler",
    "sampler; heun asks the model twice a step; models of flow take euler and heun",
    entries_in(__name__, Sampler),
    "euler",
    aka=("sample_sampler", "noise_scheduler"),
    free=True,
)

__all__ = ["SAMPLERS", "Path", "Sampler"]
