"""What a sample is seen with: which view of its image, which of its texts, and what is dropped.

All is a pure function of (seed, epoch, sample), so a run that is continued makes the same choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flame_train.data.order import caption_dropped, fraction


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to see a sample: a view and a text by number, and what is dropped.

    `dropped` are the keys of text encoders. The default is what validation sees.
    """

    view: int = 0
    text: int = 0
    drop_caption: bool = False
    dropped: frozenset[str] = frozenset()


FIRST = Choice()


@dataclass(frozen=True, slots=True)
class Choices:
    """Makes the choices of a run.

    Attributes:
        seed: the run's seed.
        caption_dropout: the probability that a caption is dropped, of each sample.
        encoder_dropout: the probability that a text encoder is dropped, by its key; independent of captions.
        views: how many views each sample has.
        texts: how many texts each sample has.
    """

    seed: int
    caption_dropout: Sequence[float]
    encoder_dropout: Mapping[str, float]
    views: Sequence[int]
    texts: Sequence[int]

    def of(self, epoch: int, index: int, draw: int) -> Choice:
        """Returns how sample `index` is seen when it comes for the `draw`-th time, from 0, in an epoch."""
        where = (self.seed, epoch, index, draw)
        dropped = (name for name, p in self.encoder_dropout.items() if caption_dropped(p, *where, name))
        return Choice(
            view=self._one_of(self.views[index], "view", where),
            text=self._one_of(self.texts[index], "text", where),
            drop_caption=caption_dropped(self.caption_dropout[index], *where),
            dropped=frozenset(dropped),
        )

    @staticmethod
    def _one_of(count: int, purpose: str, where: tuple[int, ...]) -> int:
        return int(fraction(purpose, *where) * count) if count > 1 else 0
