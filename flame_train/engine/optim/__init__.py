"""Optimizers over one flat buffer: `AdamW` and `SGD` as PyTorch has them, and the chain they are made of."""

from __future__ import annotations

from .arena import Arena, Segment
from .average import MovingAverage
from .decision import METRICS
from .facade import SGD, AdamW
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
from .rules import AdamWRule, SGDRule
from .scaler import LossScaler
from .schedule import Schedule
from .transform import ClipNorm, ClipValue, GradientNoise, Rule, State, Step, Transform

__all__ = [
    "METRICS",
    "SGD",
    "AdamW",
    "AdamWRule",
    "Arena",
    "ClipNorm",
    "ClipValue",
    "GradientNoise",
    "GradientStatistics",
    "LossScaler",
    "MovingAverage",
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
