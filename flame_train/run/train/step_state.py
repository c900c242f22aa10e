"""The networks of a run with their adapters, and the device state of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from flame_train.adapters.attach import Attached, attach
from flame_train.adapters.dropping import Chances
from flame_train.adapters.initial_lora import start_from
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.adapters.targets import LayerSettings, rates
from flame_train.config.schema import Config, LossSection
from flame_train.config.training_sections import GradientSection, OptimizerSection, ScheduleSection, TrainSection
from flame_train.diffusion.contrast import Contrast
from flame_train.diffusion.objective_kind import OBJECTIVES, Denoising
from flame_train.diffusion.preservation import Preservation
from flame_train.diffusion.preservation.off import Off
from flame_train.engine import Parameter, Tensor
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.dtype import as_dtype, bfloat16
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
from flame_train.models.common.model import Denoiser
from flame_train.optimizers import OPTIMIZERS
from flame_train.run.check.check_run import storage_of
from flame_train.run.plan.plan import Plan
from flame_train.schedules import SCHEDULES
from flame_train.text_encoders.running import RunningEncoder
from flame_train.training.session import Session
from flame_train.training.step import SharedVector, State
from flame_train.training.validation import HeldOut, Validator


def load_networks(
    plan: Plan, session: Session, initial: Mapping[str, Factors] = MappingProxyType({}), earlier: int = 0
) -> tuple[Denoiser, Attached, State]:
    """Loads the network with adapters, begun with `initial`, and a fresh state that has seen `earlier` updates."""
    c = plan.config
    denoiser = load_denoiser(plan, session.device)
    attached = attach(
        denoiser.networks(c.text_encoders.train),
        plan.checked.targets,
        rank=c.lora.rank,
        alpha=c.lora.alpha,
        seed=c.train.seed,
        kind=ADAPTERS.chosen(c.lora),
        scale=c.lora.scale,
        chances=Chances(
            c.lora.dropout, c.lora.rank_dropout, c.lora.module_dropout, c.lora.min_rank, c.lora.rank_exponent
        ),
        settings=plan.checked.layer_settings,
        per_sample_sign=plan.preserved.kind.per_sample_sign,
    )
    start_from(attached, initial)
    state = make_state(denoiser, attached, c, session, plan.checked.layer_settings, plan.preserved.kind, earlier)
    return denoiser, attached, state


def load_denoiser(plan: Plan, device: str) -> Denoiser:
    """Returns the network to adapt, loaded as the settings say, with the blocks checkpointed that they name.

    With it come the text encoders that run in the step, of which all blocks are checkpointed or none.
    """
    c = plan.config
    denoiser = plan.model.load_denoiser(
        device=device,
        dtype=c.train.precision,
        storage=storage_of(c.model.quantize, c.model.arithmetic),
        guidance_scale=c.loss.guidance_scale,
        streamed=plan.checked.streamed,
    )
    precision = {"dtype": c.train.precision, "precision": c.text_encoders.precision}
    running = tuple(RunningEncoder(e, e.load(device=device, **precision)) for e in plan.checked.running)
    denoiser = replace(denoiser, text=running)
    set_checkpointing(plan, denoiser)
    return denoiser


def set_checkpointing(plan: Plan, denoiser: Denoiser) -> None:
    """Has the networks of a step recompute what the config says."""
    checkpointing = plan.config.gradient.checkpointing
    denoiser.network.checkpoint_blocks(checkpointing, plan.checked.checkpointed)
    for each in denoiser.text:
        each.network.checkpointing = checkpointing


def make_state(
    denoiser: Denoiser,
    attached: Attached,
    config: Config,
    session: Session,
    layer_settings: Mapping[str, LayerSettings] = MappingProxyType({}),
    preservation: Preservation | None = None,
    earlier: int = 0,
) -> State:
    """Returns the device state of a fresh run: network, objective and optimizer.

    Args:
        session: gradients are means over the micro-batches of all its processes.
        layer_settings: what each layer has of its own; a learning rate counts here.
        preservation: what a micro-batch trains beside the loss of its images; None: nothing.
        earlier: the updates that the optimizer's state has seen before this run.
    """
    backend, group, train = get_backend(session.device), session.group, config.train
    layer_rates = rates(layer_settings, config.optimizer.lr)
    factors = {
        p.name: rate for layer, rate in layer_rates.items() for p in attached.adapters[layer].parameters().values()
    }
    accumulation = config.gradient.accumulation * group.world
    optimizer = build_optimizer(
        attached.parameters(),
        train,
        config.optimizer,
        config.schedule,
        config.gradient.model_copy(update={"accumulation": accumulation}),
        backend,
        attached.faster,
        factors,
        earlier,
    )
    exchanged = SharedVector.between(group, backend)
    shared_figures = 0 if exchanged is None else len(exchanged.names)
    rounded = exchanged is not None and config.gradient.all_reduce == "bf16"
    max_norm = config.lora.max_norm
    return State(
        denoiser=denoiser,
        objective=denoiser.model.objective(config.model, config.loss, session.device),
        optimizer=optimizer,
        dtype=as_dtype(train.precision),
        seed=train.seed,
        loss=Tensor(backend.xp.zeros((), np.float32)),
        figures=backend.xp.zeros(1 + len(optimizer.metric_names) + shared_figures, np.float64),
        group=group,
        exchanged=exchanged,
        sent=backend.xp.empty(optimizer.arena.grads.shape, bfloat16) if rounded else None,
        drops=attached.drops,
        limit=partial(_limit, attached, optimizer, max_norm) if max_norm else lambda: None,
        off=attached.off,
        contrast=Contrast.of(config.loss.contrastive_scale, config.loss.contrastive_schedule),
        own=None if isinstance(own := OBJECTIVES.chosen(config.loss), Denoising) else own,
        preservation=preservation or Off(),
        preservation_weight=config.preservation.weight,
    )


def _limit(attached: Attached, optimizer: Optimizer, max_norm: float) -> None:
    attached.limit(max_norm)
    optimizer.arena.sync_copies()


def make_validator(plan: Plan, state: State, images: HeldOut, session: Session) -> Validator:
    """Measures the loss of images with the run's network. A loss without weights and shifts compares with others."""
    c = plan.config
    plain = LossSection(zero_terminal_snr=c.loss.zero_terminal_snr)
    return Validator(
        state.denoiser,
        plan.model.objective(c.model, plain, session.device),
        images,
        timesteps=c.validation.timesteps,
        batch_size=c.data.batch_size,
        device=session.device,
        dtype=state.dtype,
        group=session.group,
        contrast=state.contrast,
    )


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
    """Returns the optimizer, a chain: clip by value, clip by norm, noise, rule. Each but the rule is optional.

    Args:
        train, optimizer, schedule, gradient: the sections of the config; fp16 adds loss scaling.
        faster_end: parameters whose names end with it are trained at `lora_plus_ratio` times the rate.
        rates: factors on the learning rate by parameter name.
        earlier: the updates that its state has seen before the schedule begins.
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
