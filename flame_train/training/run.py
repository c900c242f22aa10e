"""A run, ready to start: what the loop trains and who hears of it; its checkpoints and its result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from flame_train.adapters.formats import FORMATS
from flame_train.config.repeated import CheckpointSection, SampleSection
from flame_train.config.training_sections import GradientSection, LogSection, OutputSection, TrainSection
from flame_train.disk.atomic_write import remove
from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import Location
from flame_train.io.runfolder import RunFolder

from .batch import Loader
from .image_losses import ImageLosses, merge_losses
from .result import LoraWriter, Sources, checkpoint_files, formats
from .session import Session
from .slow_steps import SlowSteps
from .step import State
from .validation import Validation


@dataclass(frozen=True, slots=True)
class Run:
    """All parts of a run, ready to start at `first`."""

    train: TrainSection
    gradient: GradientSection
    checkpoint: CheckpointSection
    log: LogSection
    sample: SampleSection
    output: OutputSection
    session: Session
    folder: RunFolder
    state: State
    loader: Loader
    sources: Sources
    lora: LoraWriter
    first: int
    sample_images: Callable[[int], None]
    validation: Validation = field(default_factory=Validation)
    images: ImageLosses | None = None
    """The running losses of images; None: they are not kept."""
    slow_steps: SlowSteps | None = None
    weighted: bool = False
    """Whether losses are weighted, so that they compare with no others."""
    report: Callable[[], None] = lambda: None
    """Writes the report about the run as its folder is now; it never raises but for a lost folder."""

    @property
    def leads(self) -> bool:
        """Whether this process, of those that train together, writes the run folder."""
        return self.state.group.leads

    def epoch(self, step: int) -> float:
        """Returns how many epochs have passed after `step`."""
        return self.loader.epoch(step * self.gradient.accumulation)

    def is_last(self, step: int) -> bool:
        """Tells whether no step comes after this one."""
        return step >= self.train.steps or self.validation.over


_LOG = logging.getLogger(__name__)

IMAGES: Final = "images.json"
"""The running losses of images: the report in the run folder, and the state in a checkpoint."""


def save(run: Run, step: int) -> None:
    """Writes a checkpoint; at the end also the result. The leading process writes them, the others wait."""
    parts = _images_of_each(run)
    with run.state.group.barrier():
        if run.leads:
            _write_checkpoint(run, step, parts)


def _images_of_each(run: Run) -> list[ImageLosses]:
    """Gathers the running losses of images that each process has; nothing where none are kept."""
    if run.images is None:
        return []
    states = run.state.group.all_gather(run.images.state().decode())
    return [ImageLosses.read(state.encode()) for state in states]


def _write_checkpoint(run: Run, step: int, parts: Sequence[ImageLosses]) -> None:
    """Writes the checkpoint of a step. The one of the best validation stays beside the newest."""
    images = merge_losses(parts) if parts else None
    form = formats(run.output.format)[0]
    files, size = checkpoint_files(
        run.state.optimizer,
        step,
        run.sources,
        {
            run.folder.lora_of(step): lambda path: _write_lora(run, path, step, form),
            **({} if images is None else {IMAGES: images.state(parts)}),
        },
        run.gradient.accumulation * run.state.group.world,
        asdict(run.validation.standing),
    )
    run.folder.checkpoint(step, files, run.checkpoint.keep, size, spare={run.validation.standing.step})
    if images is not None:
        run.folder.write_report(IMAGES, images.report(step))
    _LOG.info("checkpoint of step %d: %s", step, run.folder.checkpoints / f"step-{step:06d}")
    write_best(run)
    run.session.callbacks.checkpoint(step, run.folder.checkpoints / f"step-{step:06d}")
    if run.is_last(step):
        fail_point("train.before_result")
        write_result(run, step)


def write_best(run: Run) -> None:
    """Writes the LoRA of the best validation into the run folder, whole or not at all, from its checkpoint.

    It only informs: no room for it costs a warning, and the next checkpoint or start writes it.
    """
    standing = run.validation.standing
    source = run.folder.checkpoints / f"step-{standing.step:06d}" / run.folder.lora_of(standing.step)
    try:
        raw = source.read_bytes() if standing.loss is not None else b""
        if raw and not (run.folder.best.is_file() and run.folder.best.read_bytes() == raw):
            run.folder.write_report(run.folder.best.name, raw)
    except OSError as error:
        _LOG.warning("%s: not written: %s", run.folder.best, error.strerror or error)


def write_result(run: Run, step: int) -> None:
    """Writes the LoRA in its place, whatever was there: it may be of a run with fewer steps, or in the other format.

    Removes a second file that the config no longer wants: it would pass for this result in the other format.
    """
    first, *others = formats(run.output.format)
    _write_lora(run, run.folder.place(run.folder.lora), step, first)
    for form in FORMATS[1:]:
        beside = run.folder.place(run.folder.lora_beside(form))
        if form in others:
            _write_lora(run, beside, step, form)
        elif remove(beside):  # of an earlier result
            _LOG.info("removed %s: output.format is %s now", beside, run.output.format)


def _write_lora(run: Run, path: Location, step: int, form: str) -> None:
    with run.state.optimizer.averaged():
        run.lora.write(path, step, form)
