"""Optimizers over one flat buffer: `AdamW` and `SGD` as PyTorch has them, and the chain they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..counterparts import OPTIM, absent
from .ema import EMA
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
from .scaler import LossScaler
from .schedule import Schedule
from .step_control import METRICS
from .torch_api import SGD, Adam, AdamW
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

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Says what to write for a name that PyTorch has."""
        raise absent("optim", name, OPTIM)
