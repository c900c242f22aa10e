"""The check of `betas`, which optimizers with decaying moments share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def betas_problem(betas: Sequence[float], key: str = "betas") -> Mapping[str, str]:
    """Problems of decays: each must be at least 0 and less than 1."""
    if all(0 <= beta < 1 for beta in betas):
        return {}
    return {key: f"expected each >= 0 and < 1, got {list(betas)}"}
