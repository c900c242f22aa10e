"""Ops that drop at random draw this thread's next numbers where the caller gives none, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...tensors.generator import next_rng
from ...tensors.tensor import Tensor

_INSTEAD = "rng=flame.random.Rng(xp, seed, step, samples), with a step that lies on the device"


def drawn_next(probability: str) -> Callable[[dict[str, Any]], None]:
    """Returns what gives a call of an op its `rng`, where none is given and something is dropped."""

    def fill_in(values: dict[str, Any]) -> None:
        x, p = next(iter(values.values())), values[probability]
        if values["rng"] is not None or not values.get("training", True) or not isinstance(x, Tensor):
            return
        if isinstance(p, (int, float)) and 0.0 < p <= 1.0:
            batched = x.ndim > (2 if "query" in values else 0)
            values["rng"] = next_rng(x.backend, x.shape[0] if batched else 1, instead=_INSTEAD)

    return fill_in
