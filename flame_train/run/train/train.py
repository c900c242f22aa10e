"""Stage 4, train: the loaded denoiser, its adapters and its optimizer, from the last checkpoint to the last step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from flame_train.adapters.attach import Attached, attach
from flame_train.adapters.beginning import begin_with
from flame_train.adapters.dropping import Chances
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.adapters.rules import rates
from flame_train.config.outputs import LogSection
from flame_train.config.schema import LossSection
from flame_train.config.updates import GradientSection, OptimizerSection, ScheduleSection, TrainSection
from flame_train.data.choices import Choices
from flame_train.diffusion.objectives import TrainingObjective
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.disk.files import reading
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import Tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype, bfloat16
from flame_train.engine.optim import Optimizer
from flame_train.errors import OutputError
from flame_train.io.commit import Found
from flame_train.io.runfolder import RunFolder
from flame_train.models.common.model import Denoiser, Example
from flame_train.models.common.text_in_step import RunningEncoder
from flame_train.run.check.check import storage_of
from flame_train.run.encode.encode import Encoded
from flame_train.run.finish.finish import lora_writer
from flame_train.run.plan.plan import Plan
from flame_train.run.train.grids import grid_writer
from flame_train.show.report import reporter
from flame_train.training.batch import sender
from flame_train.training.callbacks import Callbacks
from flame_train.training.exchange import SharedVector
from flame_train.training.gpu_readings import reader, spilling
from flame_train.training.image_losses import ImageLosses
from flame_train.training.image_sampling import best_effort
from flame_train.training.loader import Loader
from flame_train.training.loop import train
from flame_train.training.optimizer import build_optimizer
from flame_train.training.result import Sources, carry_over, earlier_updates, restore, standing_of, updates_done
from flame_train.training.run import Run
from flame_train.training.saving import IMAGES
from flame_train.training.slow_steps import SlowSteps
from flame_train.training.step import State
from flame_train.training.stop import StopRequest
from flame_train.training.validate import HeldOut, ValidationLoss, Validator
from flame_train.training.validation import EarlyStopping, Validation

_LOG = logging.getLogger(__name__)


def train_run(
    plan: Plan,
    encoded: Encoded,
    folder: RunFolder,
    found: Found | None,
    before: Found | None,
    sources: Sources,
    device: str,
    stop: StopRequest,
    callbacks: Callbacks,
    group: ProcessGroup = ALONE,
) -> dict[str, Any]:
    """Runs the steps that are left.

    Args:
        plan: the plan of the run.
        encoded: the encoded dataset.
        folder: the run folder, locked.
        found: the checkpoint to continue from; None: a fresh run.
        before: the checkpoint of another run that a fresh run begins with; None: it begins with nothing.
        sources: the digests of the files that the run was made from.
        device: "cuda" or "cpu".
        stop: raises Interrupted after a signal.
        callbacks: hears of steps, checkpoints and samples.
        group: the processes that train together; `plan` says what each of them does.

    Returns:
        The last step's metrics; empty if no step was left.
    """
    c = plan.config
    earlier = earlier_updates(found) if found is not None else updates_done(before) if before is not None else 0
    with group.barrier():
        begun = plan.checked.begun if found is None else {}
        denoiser, attached, state = loaded(plan, device, begun, group, earlier)
    if before is not None:
        carry_over(before, state.optimizer)
        told = "beginning with %s: its LoRA and its optimizer's state after %d updates; steps and schedule begin anew"
        _LOG.info(told, before.path, earlier)
    first = 0 if found is None else restore(found, state.optimizer)
    if first >= c.train.steps:
        _LOG.info("all %d steps are done already", c.train.steps)
    with _loader(plan, encoded, first, state, device) as loader:
        run = Run(
            train=c.train,
            gradient=c.gradient,
            checkpoint=c.checkpoint,
            log=c.log,
            sample=c.sample,
            output=c.output,
            device=device,
            folder=folder,
            state=state,
            loader=loader,
            sources=sources,
            lora=lora_writer(c, plan.model, attached, plan.samples, plan.order.batches_per_epoch),
            first=first,
            sample_images=best_effort(grid_writer(plan, encoded, denoiser, attached, folder, device, stop, group)),
            stop=stop,
            callbacks=callbacks,
            validation=_validation(plan, encoded, state, found, device, group),
            images=_images(c.log, found, group),
            slow_steps=SlowSteps(reader(device), spilling(device)),
            weighted=WEIGHTINGS.chosen(c.loss).name != "none",
            report=reporter(folder),
        )
        return train(run)


def _validation(
    plan: Plan, encoded: Encoded, state: State, found: Found | None, device: str, group: ProcessGroup
) -> Validation:
    """The validations of a run, as they stood at the checkpoint that it continues from.

    Args:
        plan: the plan of the run.
        encoded: the encoded images, those held out among them.
        state: the network and its optimizer, with whose averaged values is measured.
        found: the checkpoint; None: a fresh run.
        device: "cuda" or "cpu".
        group: the processes that train together.

    Returns:
        The validations; without any if no image is held out.
    """
    section = plan.config.validation
    if not plan.held_out.rows or not section.repeats:
        return Validation()
    offset = len(plan.samples.rows)
    images = HeldOut(
        tuple(row.item.sha256 for row in plan.held_out.rows),
        tuple(row.shape for row in plan.held_out.rows),
        lambda i: encoded.example(offset + i),
        plan.model.paddings,
    )
    validator = make_validator(plan, state, images, device, group)

    def measure() -> ValidationLoss:
        with state.optimizer.averaged():
            return validator.measure()

    standing = EarlyStopping.read(standing_of(found)) if found is not None else None
    return Validation(section, measure, standing)


def make_validator(plan: Plan, state: State, images: HeldOut, device: str, group: ProcessGroup = ALONE) -> Validator:
    """Measures the loss of images with the run's network. A loss without weights and shifts compares with others.

    Args:
        plan: the plan of the run.
        state: the network.
        images: what is held out.
        device: "cuda" or "cpu".
        group: the processes that share the batches.

    Returns:
        What measures it.
    """
    c = plan.config
    plain = LossSection(zero_terminal_snr=c.loss.zero_terminal_snr)
    return Validator(
        state.denoiser,
        plan.model.objective(c.model, plain, device),
        images,
        timesteps=c.validation.timesteps,
        batch_size=c.data.batch_size,
        device=device,
        dtype=state.dtype,
        group=group,
    )


def _images(log: LogSection, found: Found | None, group: ProcessGroup) -> ImageLosses | None:
    """The running losses of images, as the checkpoint has them; each of several processes goes on with its own."""
    if not log.images_every:
        return None
    kept = found.path / IMAGES if found is not None else None
    if kept is None or not kept.exists():
        return ImageLosses()
    with reading(kept):
        raw = kept.read_bytes()
    try:
        return ImageLosses.read(raw, group.rank, group.world)
    except ValueError as error:
        raise OutputError(f"{kept}: {error}; remove this checkpoint to continue from the one before") from error


def loaded(
    plan: Plan,
    device: str,
    begun: Mapping[str, Factors] = MappingProxyType({}),
    group: ProcessGroup = ALONE,
    earlier: int = 0,
) -> tuple[Denoiser, Attached, State]:
    """The network with its adapters, and the state of a fresh run.

    Args:
        plan: the plan of the run.
        device: "cuda" or "cpu".
        begun: what the adapters begin with.
        group: the processes that train together.
        earlier: the updates that the optimizer's state has seen before this run.

    Returns:
        The network, its adapters and the state.
    """
    c, model = plan.config, plan.model
    denoiser = load_denoiser(plan, device)
    attached = attach(
        denoiser.networks(c.text_encoders.train),
        plan.checked.targets,
        rank=c.lora.rank,
        alpha=c.lora.alpha,
        seed=c.train.seed,
        kind=ADAPTERS.chosen(c.lora),
        scale=c.lora.scale,
        chances=Chances(c.lora.dropout, c.lora.rank_dropout, c.lora.module_dropout),
        settings=plan.checked.layer_settings,
        per_sample_sign=plan.preserved.kind.per_sample_sign,
    )
    begin_with(attached, begun)
    objective = model.objective(c.model, c.loss, device)
    state = make_state(
        denoiser,
        attached,
        objective,
        c.train,
        c.optimizer,
        c.schedule,
        c.gradient,
        device,
        rates(plan.checked.layer_settings, c.optimizer.lr),
        group,
        earlier,
    )
    state = replace(
        state,
        drops=attached.drops,
        off=attached.off,
        preservation=plan.preserved.kind,
        preservation_weight=c.preservation.weight,
    )
    if c.lora.max_norm:
        state = replace(state, limit=partial(_limit, attached, state.optimizer, c.lora.max_norm))
    return denoiser, attached, state


def _limit(attached: Attached, optimizer: Optimizer, max_norm: float) -> None:
    attached.limit(max_norm)
    optimizer.arena.sync_copies()


def load_denoiser(plan: Plan, device: str) -> Denoiser:
    """The network to adapt, loaded as the settings say, with the blocks checkpointed that they name.

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
    objective: TrainingObjective,
    train: TrainSection,
    optimizer: OptimizerSection,
    schedule: ScheduleSection,
    gradient: GradientSection,
    device: str,
    layer_rates: Mapping[str, float] = MappingProxyType({}),
    group: ProcessGroup = ALONE,
    earlier: int = 0,
) -> State:
    """The device state of a fresh run.

    Args:
        denoiser: the network.
        attached: its adapters.
        objective: the loss.
        train, optimizer, schedule, gradient: the sections of the config.
        device: "cuda" or "cpu".
        layer_rates: factors on the learning rate by layer.
        group: the processes that train together; gradients are means over the micro-batches of all.
        earlier: the updates that the optimizer's state has seen before this run.

    Returns:
        Network, objective and optimizer on the device.
    """
    backend = get_backend(device)
    factors = {
        p.name: layer_rates[layer] for layer in layer_rates for p in attached.adapters[layer].parameters().values()
    }
    parameters = attached.parameters()
    of_all = gradient.model_copy(update={"accumulation": gradient.accumulation * group.world})
    made = build_optimizer(parameters, train, optimizer, schedule, of_all, backend, attached.faster, factors, earlier)
    exchanged = SharedVector.between(group, backend)
    told = 0 if exchanged is None else len(exchanged.names)
    rounded = exchanged is not None and gradient.all_reduce == "bf16"
    return State(
        denoiser=denoiser,
        objective=objective,
        optimizer=made,
        dtype=as_dtype(train.precision),
        seed=train.seed,
        loss=Tensor(backend.xp.zeros((), np.float32)),
        figures=backend.xp.zeros(1 + len(made.metric_names) + told, np.float64),
        group=group,
        exchanged=exchanged,
        sent=backend.xp.empty(made.arena.grads.shape, bfloat16) if rounded else None,
    )


def _loader(plan: Plan, encoded: Encoded, first: int, state: State, device: str) -> Loader:
    c = plan.config
    choices = Choices(
        c.train.seed,
        [row.set.caption_dropout for row in plan.samples.rows],
        {encoder.key: encoder.dropout for encoder in plan.model.text},
        [len(keys) for keys in encoded.keys.images],
        [row.text_count(cached=bool(encoded.encoding.text)) for row in plan.samples.rows],
    )
    preserved = plan.preserved

    def example(epoch: int, index: int, draw: int) -> Example:
        choice = choices.of(epoch, index, draw)
        row = plan.samples.rows[index]
        further = partial(encoded.further, images=row.seen_beside(choice.view))
        return encoded.example(index, choice) | preserved.arrays(row, choice, further)

    return Loader(
        plan.order,
        example,
        plan.samples.names,
        first=first * c.gradient.accumulation,
        accumulation=c.gradient.accumulation,
        send=sender(get_backend(device), state.dtype),
        group=state.group,
        paddings=preserved.paddings(plan.model.paddings),
    )
