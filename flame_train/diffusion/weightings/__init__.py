"""Weightings of noise levels that a config can choose: each is a class in a file of this folder."""

from __future__ import annotations

from typing import Any

from flame_train.engine.dtype import Array
from flame_train.settings import Entry, Table, entries_in


class Weighting(Entry):
    """One weighting of noise levels: its fields are keys of `[loss]`.

    It serves the models for which it has a formula: `of_snr` for those that predict noise or v, `of_flow` for those
    that predict a velocity. One that defines neither weighs every sample alike, in both.
    """

    def of_snr(self, snr: Any, prediction: str) -> Any:
        """Returns the weight of each timestep, fp64 (T,), for its signal-to-noise ratio, fp64 (T,).

        `prediction` is "epsilon" or "v".
        """
        raise NotImplementedError

    def of_flow(self, sigma: Array) -> Array:
        """Returns the weight of each sample, (B,) on the device, for its noise level in (0, 1)."""
        raise NotImplementedError

    @classmethod
    def serves(cls, flow: bool) -> bool:
        """Says whether there is a formula for models that predict a velocity (`flow`), or for the others."""
        own = {name for name in ("of_snr", "of_flow") if getattr(cls, name) is not getattr(Weighting, name)}
        return not own or ("of_flow" if flow else "of_snr") in own

    @property
    def uniform(self) -> bool:
        """Whether every sample has the weight 1."""
        return type(self).of_snr is Weighting.of_snr and type(self).of_flow is Weighting.of_flow


WEIGHTINGS: Table[Weighting] = Table(
    "weighting", "weight of a noise level in the loss", entries_in(__name__, Weighting), "none"
)
