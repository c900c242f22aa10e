"""A run, ready to start: what the loop trains, where it writes, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flame_train.config.repeated import CheckpointSection, SampleSection
from flame_train.config.updates import GradientSection, LogSection, OutputSection, TrainSection
from flame_train.io.runfolder import RunFolder

from .image_losses import ImageLosses
from .loader import Loader
from .result import LoraWriter, Sources
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
        """How many epochs have passed after `step`."""
        return self.loader.epoch(step * self.gradient.accumulation)

    def is_last(self, step: int) -> bool:
        """Whether no step comes after this one."""
        return step >= self.train.steps or self.validation.over
