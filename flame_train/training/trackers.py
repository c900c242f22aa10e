"""Programs that show a run while it goes on. A tracker that fails is given up with one warning; the run goes on."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from flame_train.data.grid import places, png

_LOG = logging.getLogger(__name__)
_GIB: Final = 2**30


class Tracker(ABC):
    """A program that shows a run.

    Attributes:
        says: the subject and verb of a warning, such as "TensorBoard events are".
        extra: the extra of the package that installs it.
    """

    says: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def write(self, record: Mapping[str, Any]) -> None:
        """A point on each curve, from a line of the log."""

    @abstractmethod
    def show(self, step: int, images: Mapping[str, bytes]) -> None:
        """Sample images as PNGs, by their names."""

    @abstractmethod
    def close(self) -> None:
        """Writes what is left."""


class Trackers:
    """The trackers of a run, each opened by a function, by its class."""

    def __init__(self, openers: Mapping[type[Tracker], Callable[[], Tracker]]) -> None:
        self._open: list[Tracker] = []
        for kind, opener in openers.items():
            try:
                self._open.append(opener())
            except ImportError:
                _LOG.warning("%s not written: pip install 'flame-train[%s]'", kind.says, kind.extra)
            except Exception as e:  # besides the disk's errors: a library of another version raises others
                _LOG.warning("%s not written: %s", kind.says, e)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.close())

    def write(self, record: Mapping[str, Any]) -> None:
        """A point on each curve."""
        self._each(lambda tracker: tracker.write(record))

    def show(self, step: int, grid: Path, prompts: Sequence[str]) -> None:
        """The images of a sample grid."""
        if self._open and grid.exists():
            self._each(lambda tracker: tracker.show(step, images_of(grid, prompts)))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for tracker in list(self._open):
            try:
                work(tracker)
            except Exception as e:
                _LOG.warning("%s no longer written: %s", tracker.says, e)
                self._open.remove(tracker)
                with contextlib.suppress(Exception):  # it may try once more what has failed
                    tracker.close()


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the log, by the name of their curve."""
    values = {name: float(record[name]) for name in ("loss", "lr", "grad_norm", "loss_scale", "images_per_s")}
    if record.get("memory") is not None:
        values["memory_gib"] = record["memory"] / _GIB
    values |= {f"gradients/{block}": float(norm) for block, norm in record.get("gradients", {}).items()}
    if "validation" in record:
        measured = record["validation"]
        values["validation/loss"] = float(measured["loss"])
        values |= {f"validation/{band}": float(loss) for band, loss in measured["bands"].items()}
    return values


def images_of(grid: Path, prompts: Sequence[str]) -> dict[str, bytes]:
    """The images of a sample grid as PNGs, by number and prompt; the whole grid if its images have several sizes."""
    import numpy as np
    from PIL import Image

    with Image.open(grid) as image:
        sheet = np.asarray(image.convert("RGB"))
    found = places((sheet.shape[0], sheet.shape[1]), len(prompts))
    if not found:
        return {"samples": png(sheet)}
    return {
        f"samples/{i:02} {prompt}": png(sheet[top : top + h, left : left + w])
        for i, ((top, left, h, w), prompt) in enumerate(zip(found, prompts, strict=True), 1)
    }
