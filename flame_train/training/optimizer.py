"""The optimizer a config asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from flame_train.config.updates import GradientSection, OptimizerSection, ScheduleSection, TrainSection
from flame_train.engine import Parameter
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import as_dtype
from flame_train.engine.optim import (
    EMA,
    ClipNorm,
    ClipValue,
    FlatParameters,
    GradientNoise,
    LossScaler,
    Optimizer,
    Transform,
)
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES


def build_optimizer(
    parameters: Iterable[Parameter],
    train: TrainSection,
    optimizer: OptimizerSection,
    schedule: ScheduleSection,
    gradient: GradientSection,
    backend: Backend,
    faster_end: str = "",
    rates: Mapping[str, float] = MappingProxyType({}),
    earlier: int = 0,
) -> Optimizer:
    """Builds the chain: clip by value, clip by norm, noise, rule. Each but the rule is optional.

    Args:
        parameters: the trainable parameters.
        train, optimizer, schedule, gradient: the sections of the config; fp16 adds loss scaling.
        backend: the device.
        faster_end: parameters whose names end with it are trained at `lora_plus_ratio` times the rate.
        rates: factors on the learning rate by parameter name.
        earlier: the updates that its state has seen before the schedule begins.

    Returns:
        The optimizer.
    """
    chain: list[Transform] = []
    if gradient.clip_value > 0:
        chain.append(ClipValue(gradient.clip_value))
    if gradient.clip_norm > 0:
        chain.append(ClipNorm(gradient.clip_norm, gradient.normalize))
    if gradient.noise_std > 0:
        chain.append(GradientNoise(gradient.noise_std, train.seed, gradient.noise_decay))
    chain.append(OPTIMIZERS.chosen(optimizer).rule())
    trained = list(parameters)
    faster = {p.name: optimizer.lora_plus_ratio for p in trained if faster_end and p.name.endswith(faster_end)}
    scale = {p.name: faster.get(p.name, 1.0) * rates.get(p.name, 1.0) for p in trained if p.name in {*faster, *rates}}
    return Optimizer(
        FlatParameters(trained, backend, compute_dtype=as_dtype(train.precision), lr_scale=scale),
        chain,
        lr=optimizer.lr,
        schedule=replace(
            SCHEDULES.chosen(schedule).build(train.steps, schedule.warmup_of(train.steps), schedule.min_lr),
            begins=earlier,
        ),
        accumulation=gradient.accumulation,
        scaler=_scaler(train) if train.precision == "fp16" else None,
        average=EMA(train.ema_decay) if train.ema_decay else None,
        halt=True,
    )


def _scaler(train: TrainSection) -> LossScaler:
    if train.loss_scale == "dynamic":
        return LossScaler(train.loss_scale_init, interval=train.loss_scale_interval)
    return LossScaler(train.loss_scale, dynamic=False)
