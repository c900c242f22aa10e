"""Optimizers over one flat buffer: `AdamW` and `SGD` as PyTorch has them, and the chain they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import lazy
from ..counterparts import OPTIM, absent
from .flat_parameters import FlatParameters, Segment
from .gradients import (
    GradientStatistics,
    add_noise_,
    clip_each_grad_norm_,
    clip_grad_norm_,
    clip_grad_value_,
    normalize,
    statistics,
)
from .optimizer import Optimizer
from .optimizers import AdamRule, AdamWRule, SGDRule
from .schedule import Schedule
from .step_control import EMA, METRICS, LossScaler
from .transform import ClipNorm, ClipValue, GradientNoise, Rule, State, Step, Transform

__all__ = [
    "EMA",
    "METRICS",
    "SGD",
    "Adam",
    "AdamRule",
    "AdamW",
    "AdamWRule",
    "ClipNorm",
    "ClipValue",
    "FlatParameters",
    "GradientNoise",
    "GradientStatistics",
    "LossScaler",
    "Optimizer",
    "Rule",
    "SGDRule",
    "Schedule",
    "Segment",
    "State",
    "Step",
    "Transform",
    "add_noise_",
    "clip_each_grad_norm_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "normalize",
    "statistics",
]

if TYPE_CHECKING:  # the library's, loaded when asked for
    from ..library.torch_optimizers import SGD, Adam, AdamW
else:

    def __getattr__(name: str) -> Any:
        """Loads an optimizer of the library; of any other name says what to write."""
        if name in lazy.OPTIMIZERS:
            return globals().setdefault(name, lazy.attribute(lazy.OPTIMIZERS, name))
        raise absent("optim", name, OPTIM)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
