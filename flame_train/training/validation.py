"""Validation: the loss on images, noise and levels that stay the same, when it is due, and early stopping.

Two values differ by the training alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from flame_train.config.repeated import ValidationSection
from flame_train.data.padding import NO_PADDINGS, Paddings, collate
from flame_train.diffusion.contrast import Contrast
from flame_train.diffusion.objectives import TrainingObjective
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import Tensor, capture, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType
from flame_train.engine.mode import deterministic
from flame_train.models.common.model import Example

from .batch import Batch, HostBatch, Signature
from .step import Denoiser, batch_losses

_LOG = logging.getLogger(__name__)

SEED: Final = 0x5A11DA7E
"""Of the noise: the same in every run, so that their values compare."""

_STEP: Final = 1 << 31
"""Random numbers are named by step; training's steps stay below this one, so held-out noise is never trained on."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Images that are never trained on.

    Attributes:
        names: what an image's noise follows from, such as the hash of its bytes.
        shapes: anything that is equal for images whose arrays have equal shapes, such as their buckets.
        example: the arrays of the image of this number.
        paddings: how arrays of different lengths are filled up.
    """

    names: tuple[str, ...]
    shapes: tuple[Any, ...]
    example: Callable[[int], Example]
    paddings: Paddings = field(default_factory=dict)

    @classmethod
    def of(cls, examples: Sequence[Example], paddings: Paddings = NO_PADDINGS) -> HeldOut:
        """Takes examples that are in memory; an example's noise follows from its number."""
        shapes = [tuple(sorted((name, a.shape) for name, a in e.items())) for e in examples]
        return cls(tuple(map(str, range(len(examples)))), tuple(shapes), lambda i: examples[i], paddings)


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """The mean loss, the mean in each band of noise levels, in thousandths "0-250", and the time that it took."""

    loss: float
    bands: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Row:
    """An image at a noise level."""

    image: int
    band: int


class Validator:
    """Measures the loss of images at the middle of each of `timesteps` bands of noise levels, forward only.

    Batches have one size, so that each shape has one captured step; the last one repeats rows, which do not count.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        objective: TrainingObjective,
        images: HeldOut,
        *,
        timesteps: int,
        batch_size: int,
        device: str,
        dtype: DType,
        group: ProcessGroup = ALONE,
        contrast: Contrast | None = None,
    ) -> None:
        """Reads and computes nothing yet.

        Args:
            denoiser: the network, whose weights at the time of a measurement count.
            objective: the loss; values of one with other weights do not compare.
            images: what is held out.
            timesteps: the number of bands, and of noise levels of an image.
            batch_size: images in a batch.
            group: the processes that share the batches; each learns all losses.
            contrast: contrastive guidance, as the step has it: its loss is what training makes smaller.

        Raises:
            ValueError: there are no images.
        """
        if not images.names:
            raise ValueError("a validation needs at least one image, got none")
        self._denoiser, self._objective, self._images = denoiser, objective, images
        self._timesteps, self._size, self._device, self._dtype = timesteps, batch_size, device, dtype
        self._backend, self._group, self._contrast = get_backend(device), group, contrast
        self._levels = self._backend.to_device(np.zeros(batch_size, np.float32))
        self._losses = self._backend.to_device(np.zeros(batch_size, np.float32))
        self._steps: dict[Signature, tuple[Batch, Callable[[], None]]] = {}

    def measure(self) -> ValidationLoss:
        """Returns the loss with the present weights."""
        begin = time.monotonic()
        losses = np.zeros((self._timesteps, len(self._images.names)), np.float64)
        batches, mine = self._batches(), list[tuple[int, int, float]]()
        with self._group.barrier(), deterministic(True):
            for number in self._group.share(len(batches)):
                rows = batches[number]
                mine += [(row.band, row.image, float(loss)) for row, loss in zip(rows, self._run(rows), strict=False)]
        for text in self._group.all_gather(json.dumps(mine)):
            for band, image, loss in json.loads(text):
                losses[band, image] = loss
        means = losses.mean(axis=1)
        edges = [round(1000 * i / self._timesteps) for i in range(self._timesteps + 1)]
        names = [f"{low}-{high}" for low, high in itertools.pairwise(edges)]
        return ValidationLoss(
            float(means.mean()), dict(zip(names, means.tolist(), strict=True)), time.monotonic() - begin
        )

    def _batches(self) -> list[list[_Row]]:
        """Cuts all rows into batches of one shape each; the order depends on the images alone."""
        shapes = dict.fromkeys(self._images.shapes)
        groups = [[i for i, each_shape in enumerate(self._images.shapes) if each_shape == shape] for shape in shapes]
        rows = [[_Row(image, band) for image in group for band in range(self._timesteps)] for group in groups]
        return [group[i : i + self._size] for group in rows for i in range(0, len(group), self._size)]

    def _run(self, rows: Sequence[_Row]) -> np.ndarray[Any, Any]:
        filled = [*rows, *(rows[0] for _ in range(self._size - len(rows)))]
        examples = {row.image: self._images.example(row.image) for row in rows}
        host = HostBatch(
            collate([examples[row.image] for row in filled], self._images.paddings),
            _STEP,
            np.array([self._number(row) for row in filled], np.int64),
            (),
        )
        batch, run = self._step_for(host)
        batch.fill(host)
        levels = [(row.band + 0.5) / self._timesteps for row in filled]
        self._backend.write(self._levels, np.array(levels, np.float32))
        run()
        return self._backend.to_host(self._losses)

    def _number(self, row: _Row) -> int:
        name = f"{self._images.names[row.image]} {row.band}".encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:4], "little")

    def _step_for(self, host: HostBatch) -> tuple[Batch, Callable[[], None]]:
        if host.signature not in self._steps:
            batch = Batch(host, self._backend, self._dtype)
            self._steps[host.signature] = batch, capture(lambda: self._forward(batch), self._device)
        return self._steps[host.signature]

    def _forward(self, batch: Batch) -> None:
        with no_grad():
            times = self._objective.at_levels(Tensor(self._levels))
            given = self._objective, self._dtype, SEED, batch, times, self._contrast
            losses, _ = batch_losses(self._denoiser, *given)
            self._losses[...] = losses.data


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """The lowest loss so far, its step, and how many validations came after it; checkpoints hold it.

    `measured` is a hash of what is measured, images and levels; "" in checkpoints of an older version.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0
    measured: str = ""

    @classmethod
    def read(cls, state: Any) -> EarlyStopping:
        """Returns the standing that a checkpoint holds as JSON; a fresh one if it holds none."""
        if not isinstance(state, dict) or not {"loss", "step", "since"} <= state.keys():
            return cls()
        return cls(state["loss"], state["step"], state["since"], str(state.get("measured", "")))

    def on(self, measured: str) -> EarlyStopping:
        """Returns the standing for validations of this hash: a fresh one, if those so far measured something else."""
        if self.measured not in ("", measured) and self.loss is not None:
            _LOG.warning(
                "the lowest validation loss so far, %.4g after step %d, was of other images, captions or "
                "validation.timesteps; the lowest is counted anew",
                *(self.loss, self.step),
            )
            return EarlyStopping(measured=measured)
        return replace(self, measured=measured)

    def after(self, step: int, loss: float) -> EarlyStopping:
        """Returns the standing after one more validation. A loss that is no number is never the best."""
        if self.loss is None or loss < self.loss:
            return EarlyStopping(loss if loss == loss else None, step, measured=self.measured)
        return replace(self, since=self.since + 1)


class Validation:
    """The validations of one run. Of several processes each measures its share, and all learn the same loss."""

    def __init__(
        self,
        section: ValidationSection | None = None,
        measure: Callable[[], ValidationLoss] | None = None,
        standing: EarlyStopping | None = None,
    ) -> None:
        """Begins the validations after those that `standing` is of.

        Args:
            section: the `[validation]` section; None: there are no validations.
            measure: measures the loss; None: nothing is held out.
            standing: of the run so far.
        """
        self._section, self._measure = section, measure
        self.standing = standing or EarlyStopping()

    def is_due(self, step: int, epoch: Callable[[int], float]) -> bool:
        """Tells whether one is due after `step`."""
        return self._section is not None and self._measure is not None and self._section.is_due(step, epoch)

    def at(self, step: int) -> Mapping[str, Any]:
        """Measures after `step`. Returns what the log says of it."""
        assert self._measure is not None
        loss = self._measure()
        self.standing = self.standing.after(step, loss.loss)
        best = self.standing.loss
        _LOG.info(
            "validation after step %d: loss %.4g (best %.4g after step %d), %.1f s",
            *(step, loss.loss, math.nan if best is None else best, self.standing.step, loss.seconds),
        )
        return {
            "loss": loss.loss,
            "bands": dict(loss.bands),
            "seconds": round(loss.seconds, 3),
            "best": {"step": self.standing.step, "loss": self.standing.loss},
        }

    def is_best(self, step: int) -> bool:
        """Tells whether the validation after `step` was the best so far."""
        return self.standing.loss is not None and self.standing.step == step

    @property
    def early_stop_message(self) -> str:
        """What a run says that patience has ended."""
        best = self.standing
        return (
            f"validation.patience: {best.since} validations brought no lower loss than {best.loss:.4g} after step "
            f"{best.step}, whose checkpoint is kept; the run is done"
        )

    @property
    def over(self) -> bool:
        """Whether patience is at its end, and the run with it."""
        patience = self._section.patience if self._section is not None and self._measure is not None else 0
        return 0 < patience <= self.standing.since
