"""Callbacks: functions of the caller that hear of a run's progress. It may look, and changes no trained bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that a run calls in its own thread; None: nobody listens.

    Args:
        on_step: gets each line of `log.jsonl`, as a read-only mapping, one step late: the device works on meanwhile.
        on_checkpoint: gets the step and the folder of a checkpoint that is on the disk.
        on_sample: gets the step and the file of a sample grid that is on the disk.

    An exception of a function ends the run as any error does: the checkpoints stay, and the same call continues it.
    """

    on_step: Callable[[Mapping[str, Any]], object] | None = None
    on_checkpoint: Callable[[int, Path], object] | None = None
    on_sample: Callable[[int, Path], object] | None = None

    def step(self, record: Mapping[str, Any]) -> None:
        """Tells of a step's figures."""
        if self.on_step is not None:
            self.on_step(MappingProxyType(dict(record)))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Tells of a checkpoint."""
        if self.on_checkpoint is not None:
            self.on_checkpoint(step, folder)

    def sample(self, step: int, file: Path) -> None:
        """Tells of a sample grid, if it was written."""
        if self.on_sample is not None and file.exists():
            self.on_sample(step, file)


SILENT: Final = Callbacks()
"""Nobody listens."""
