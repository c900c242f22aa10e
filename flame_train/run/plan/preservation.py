"""What an example has for preservation: further captions, and whether the base model teaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from flame_train.config.schema import Config
from flame_train.data.padding import Paddings
from flame_train.data.samples import Sample, Samples
from flame_train.diffusion.preservation import PRESERVATIONS, Preservation
from flame_train.models.common.model import Example
from flame_train.training.batch import FURTHER, TAUGHT

if TYPE_CHECKING:
    from flame_train.data.choices import Choice


@dataclass(frozen=True, slots=True)
class Preserved:
    """What the examples of a run have for preservation.

    Attributes:
        kind: which further captions there are.
        taught: whether the base model teaches any sample.
    """

    kind: Preservation
    taught: bool

    @classmethod
    def of(cls, config: Config, samples: Samples) -> Preserved:
        """Of a config, for samples that are trained on."""
        return cls(PRESERVATIONS.chosen(config.preservation), any(own.taught for own in samples.sets))

    def texts(self, row: Sample) -> tuple[str, ...]:
        """Every further caption of a sample, each once."""
        every = (
            further for text in ("", *row.texts) for further in self.kind.texts(text, row.set.captions.trigger).values()
        )
        return tuple(dict.fromkeys(every))

    def arrays(self, row: Sample, choice: Choice, captions: Callable[[str], Example]) -> Example:
        """The arrays of a sample that is seen with `choice`; `captions` gives those of a caption."""
        text = "" if choice.drop_caption else row.text(choice.text)
        further = self.kind.texts(text, row.set.captions.trigger)
        made = {f"{name}{FURTHER}{n}": a for name, caption in further.items() for n, a in captions(caption).items()}
        return made | ({TAUGHT: np.full((1, 1, 1), row.set.taught, np.float32)} if self.taught else {})

    def paddings(self, own: Paddings) -> Paddings:
        """How arrays of different lengths are filled up: those of further captions as the own are."""
        names = self.kind.texts("", "")
        return dict(own) | {
            f"{name}{FURTHER}{n}": replace(p, rows=f"{name}{FURTHER}{p.rows}" if p.rows else "")
            for name in names
            for n, p in own.items()
        }
