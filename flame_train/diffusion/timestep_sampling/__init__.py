"""Distributions of noise levels that a config can choose: each is a class in a file of this folder."""

from __future__ import annotations

from flame_train.settings import Table, entries_in

from .kind import Stream, TimestepSampling

TIMESTEP_SAMPLINGS: Table[TimestepSampling] = Table(
    "timestep_sampling",
    "how noise levels are drawn; auto: the family's own",
    entries_in(__name__, TimestepSampling),
    "auto",
    aka=("timesteps", "timestep_type", "weighting_scheme"),
)

__all__ = ["TIMESTEP_SAMPLINGS", "Stream", "TimestepSampling"]
