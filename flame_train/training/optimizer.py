"""The optimizer a config asks for."""

from __future__ import annotations

from collections.abc import Iterable

from flame_train.config.schema import Config
from flame_train.engine import Parameter
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import as_dtype
from flame_train.engine.optim import (
    AdamWRule,
    Arena,
    ClipNorm,
    ClipValue,
    GradientNoise,
    LossScaler,
    MovingAverage,
    Optimizer,
    Schedule,
    SGDRule,
    Transform,
)


def build_optimizer(parameters: Iterable[Parameter], config: Config, backend: Backend) -> Optimizer:
    """Clip by value, clip by norm, noise, rule: in that order, each only if asked for. fp16 scales its loss."""
    g, o, s = config.gradient, config.optimizer, config.schedule
    chain: list[Transform] = []
    if g.clip_value > 0:
        chain.append(ClipValue(g.clip_value))
    if g.clip_norm > 0:
        chain.append(ClipNorm(g.clip_norm))
    if g.noise_std > 0:
        chain.append(GradientNoise(g.noise_std, config.train.seed, g.noise_decay))
    if o.name == "adamw":
        chain.append(AdamWRule(o.betas, o.eps, o.weight_decay))
    else:
        chain.append(SGDRule(momentum=o.momentum, weight_decay=o.weight_decay))
    schedule = Schedule(s.name, config.train.steps, s.warmup_steps, s.cycles, s.power, s.min_lr)
    scaler = LossScaler() if config.train.precision == "fp16" else None
    average = MovingAverage(config.train.ema_decay) if config.train.ema_decay else None
    arena = Arena(parameters, backend, working=as_dtype(config.train.precision))
    return Optimizer(
        arena, chain, lr=o.lr, schedule=schedule, accumulation=g.accumulation, scaler=scaler, average=average, halt=True
    )
