"""Stage 4, train: the loaded denoiser, its adapters and its optimizer, from the last checkpoint to the last step."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from typing import Any

from flame_train.config.training_sections import LogSection
from flame_train.data.order import Choices
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.disk.preflight import reading
from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.local_memory import keeping_once
from flame_train.engine.backend import get_backend
from flame_train.errors import OutputError
from flame_train.io.commit import Checkpoint
from flame_train.io.runfolder import RunFolder
from flame_train.models.common.model import Example
from flame_train.run.encode.encode import Encoded
from flame_train.run.finish.finish import lora_writer
from flame_train.run.plan.plan import Plan
from flame_train.run.plan.start import Start, dataset_digest
from flame_train.run.train.sample_grids import best_effort, grid_writer
from flame_train.run.train.step_state import load_networks, make_validator
from flame_train.show.report import reporter
from flame_train.training.batch import Loader, sender
from flame_train.training.image_losses import ImageLosses
from flame_train.training.loop import train
from flame_train.training.result import carry_over, restore, standing_of, warn_of_damaged
from flame_train.training.run import IMAGES, Run
from flame_train.training.session import Session
from flame_train.training.slow_steps import SlowSteps, reader, spilling
from flame_train.training.step import State
from flame_train.training.validation import EarlyStopping, HeldOut, Validation, ValidationLoss

_LOG = logging.getLogger(__name__)


def train_run(plan: Plan, encoded: Encoded, folder: RunFolder, start: Start, session: Session) -> dict[str, Any]:
    """Runs the steps that are left; returns the last step's metrics, empty if none was left.

    Args:
        start: what the run starts with.
        session: of this process; `plan` says what it does of the work of all.
    """
    c, checkpoint, before = plan.config, start.checkpoint, start.before
    earlier = start.count_earlier_updates()
    once = keeping_once(session.group, bool(plan.checked.streamed))
    with session.group.barrier(), once:
        initial = plan.checked.initial_lora if checkpoint is None else {}
        if checkpoint is None and getattr(c.lora, "from") and not initial:
            raise OutputError(f"{c.output.dir}: its checkpoints were removed meanwhile; start the run again")
        denoiser, attached, state = load_networks(plan, session, initial, earlier)
    if before is not None:
        warn_of_damaged(before)
        carry_over(before, state.optimizer)
        message = (
            "beginning with %s: its LoRA and its optimizer's state after %d updates; steps and schedule begin anew"
        )
        _LOG.info(message, before.path, earlier)
    first = 0 if checkpoint is None else restore(checkpoint, state.optimizer)
    if first >= c.train.steps:
        _LOG.info("all %d steps are done already", c.train.steps)
    with _loader(plan, encoded, first, state, session.device) as loader:
        run = Run(
            train=c.train,
            gradient=c.gradient,
            checkpoint=c.checkpoint,
            log=c.log,
            sample=c.sample,
            output=c.output,
            session=session,
            folder=folder,
            state=state,
            loader=loader,
            sources=start.sources,
            lora=lora_writer(c, plan.model, attached, plan.samples, plan.order.batches_per_epoch),
            first=first,
            sample_images=best_effort(grid_writer(plan, encoded, denoiser, attached, folder, session)),
            validation=_validation(plan, encoded, state, checkpoint, session),
            images=_images(c.log, checkpoint, session.group),
            slow_steps=SlowSteps(reader(session.device), spilling(session.device)),
            weighted=WEIGHTINGS.chosen(c.loss).name != "none",
            report=reporter(folder),
        )
        if get_backend(session.device).asynchronous and first < c.train.steps:
            _LOG.info("training begins; kernels that this GPU lacks are compiled in its first steps")
        return train(run)


def _validation(
    plan: Plan, encoded: Encoded, state: State, checkpoint: Checkpoint | None, session: Session
) -> Validation:
    """Returns the validations of a run, as they stood at the checkpoint that it continues from."""
    section = plan.config.validation
    standing = EarlyStopping.read(None if checkpoint is None else standing_of(checkpoint))
    if not plan.held_out.rows or not section.repeats:
        return Validation(standing=standing)  # the best checkpoint so far stays
    offset, preserved = len(plan.samples.rows), plan.preserved

    def example(i: int) -> Example:
        further = partial(encoded.further, images=plan.held_out.rows[i].controls_beside(0))
        return encoded.example(offset + i) | preserved.unprompted(further)

    images = HeldOut(
        tuple(row.item.sha256 for row in plan.held_out.rows),
        tuple(row.shape for row in plan.held_out.rows),
        example,
        preserved.paddings(plan.model.paddings),
    )
    validator = make_validator(plan, state, images, session)

    def measure() -> ValidationLoss:
        with state.optimizer.averaged():
            return validator.measure()

    measured = dataset_digest(plan.held_out, encoded.keys, offset) + f" {section.timesteps}"
    return Validation(section, measure, standing.on(hashlib.sha256(measured.encode()).hexdigest()))


def _images(log: LogSection, checkpoint: Checkpoint | None, group: ProcessGroup) -> ImageLosses | None:
    """Reads the running losses of images, as the checkpoint has them; each of several processes has its own."""
    if not log.images_every:
        return None
    file = checkpoint.path / IMAGES if checkpoint is not None else None
    if file is None or not file.exists():
        return ImageLosses()
    with reading(file):
        raw = file.read_bytes()
    try:
        return ImageLosses.read(raw, group.rank, group.world)
    except ValueError as error:
        raise OutputError(f"{file}: {error}; remove this checkpoint to continue from the one before") from error


def _least(counts: list[int], group: int) -> list[int]:
    """Returns the least count of each group of so many items, for each of its items."""
    return [min(counts[i - i % group : i - i % group + group]) for i in range(len(counts))]


def _loader(plan: Plan, encoded: Encoded, first: int, state: State, device: str) -> Loader:
    c = plan.config
    choices = Choices(
        c.train.seed,
        [row.set.caption_dropout for row in plan.samples.rows],
        {encoder.key: encoder.dropout for encoder in plan.model.text},
        _least([len(keys) for keys in encoded.keys.images], plan.samples.group),
        [row.text_count(cached=bool(encoded.encoding.text)) for row in plan.samples.rows],
    )
    preserved = plan.preserved

    def example(epoch: int, index: int, draw: int) -> Example:
        choice = choices.of(epoch, index - index % plan.samples.group, draw)
        row = plan.samples.rows[index]
        further = partial(encoded.further, images=row.controls_beside(choice.view))
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
