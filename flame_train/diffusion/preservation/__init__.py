"""What a step trains beside the loss of images, so that a model keeps what it knows: each is a file of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from flame_train.engine import Tensor
from flame_train.settings import Entry, Table, entries_in


class Predictions(Protocol):
    """The predictions of a micro-batch, for its latents, noise and timesteps."""

    @property
    def strength(self) -> Tensor:
        """(1,) fp32: how strongly the adapters act in `trained`, -1 or 1."""

    def trained(self, text: str) -> Tensor:
        """Gives the network's prediction (B, H, W, C), fp32, for the caption that `Preservation.texts` calls `text`."""

    def base(self, text: str) -> Tensor:
        """Returns the base model's, without the adapters and without a gradient."""


class Preservation(Entry):
    """One kind of preservation: its fields are further keys of `[preservation]`."""

    active: ClassVar[bool] = True
    """Whether it adds anything to a step."""

    instead: ClassVar[bool] = False
    """Whether it stands in the place of the images' own loss."""

    per_sample_sign: ClassVar[bool] = False
    """Whether adapters act with strength -1 in some micro-batches, and 1 in the others."""

    def texts(self, caption: str, trigger: str) -> Mapping[str, str]:
        """Returns the further captions of a sample, by name.

        Args:
            trigger: the word for what is taught, if its set has one.

        Returns:
            The captions that `losses` asks for; the names do not depend on the caption.
        """
        raise NotImplementedError

    def losses(self, predictions: Predictions) -> Tensor:
        """Returns each sample's loss (B,), fp32."""
        raise NotImplementedError


def mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Returns (B,): the mean over a sample's values of (a - b)^2."""
    error: Tensor = (a - b).square().mean(dim=tuple(range(1, a.ndim)))
    return error


PRESERVATIONS: Table[Preservation] = Table(
    "kind",
    "what is kept as the base model has it; class: a class of things beside the trigger; blank: images without a "
    "caption; slider: no image is learnt, but an axis between two prompts",
    entries_in(__name__, Preservation),
    "off",
)
