"""The noise of training: standard normal, changed by each kind in a file of this folder."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flame_train.diffusion.random_streams import Stream
from flame_train.engine import Tensor
from flame_train.engine.random import Rng
from flame_train.settings import AllOf, Entry, Section, entries_in


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


NOISE_KINDS: AllOf[NoiseKind] = AllOf(sorted(entries_in(__name__, NoiseKind), key=lambda kind: kind.order))


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard normal noise, changed by each of `kinds` in their order."""

    kinds: tuple[NoiseKind, ...] = ()

    @classmethod
    def of(cls, section: Section) -> Noise:
        """Returns the noise that `[loss]` asks for."""
        kinds = sorted(NOISE_KINDS.of(section), key=lambda kind: kind.order)
        return cls(tuple(kind for kind in kinds if kind.on))

    def drawn(self, rng: Rng, latents: Tensor) -> Tensor:
        """Returns the noise (B, H, W, C) fp32 of the target, for latents of this shape."""
        noise = Tensor(rng.normal(Stream.NOISE, latents.shape[1:]))
        for kind in self.kinds:
            noise = kind.changed(noise, latents, rng)
        return noise

    def mixed(self, rng: Rng, noise: Tensor) -> Tensor:
        """Returns the noise that is mixed into the latents."""
        for kind in self.kinds:
            noise = kind.mixed(noise, rng)
        return noise
