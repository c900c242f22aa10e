"""Distributions of noise levels that a config can choose: each is a class in a file of this folder."""

from __future__ import annotations

import sys

from flame_train.settings import Table, entries_in

from .kind import Stream, TimestepSampling

TIMESTEP_SAMPLINGS: Table[TimestepSampling] = Table(
    "timestep_sampling",
    "distribution of noise levels; auto: the family's own",
    entries_in(sys.modules[__name__], TimestepSampling),
    "auto",
    aka=("timesteps", "timestep_type", "weighting_scheme"),
)

__all__ = ["TIMESTEP_SAMPLINGS", "Stream", "TimestepSampling"]
