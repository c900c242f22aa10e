"""The interface of a kind of noise: a change of the standard normal noise."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from flame_train.engine import Tensor
from flame_train.engine.random import Rng
from flame_train.settings import Entry


class NoiseKind(Entry):
    """One change of the noise: its fields are keys of `[loss]`, which say how strong it is. Several go together.

    All runs on the device within the captured step. Tensors are (B, H, W, C) fp32.
    """

    order: ClassVar[int]
    """Kinds of smaller numbers come first."""

    @property
    @abstractmethod
    def on(self) -> bool:
        """Whether its keys ask for any change."""

    def changed(self, noise: Tensor, latents: Tensor, rng: Rng) -> Tensor:
        """Returns the noise that is mixed into the latents and that a prediction is compared with."""
        return noise

    def mixed(self, noise: Tensor, rng: Rng) -> Tensor:
        """Returns the noise that is mixed into the latents, if it differs from the target's."""
        return noise
