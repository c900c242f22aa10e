"""What the loss of a step is made of. The package has the usual one; a script may register others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from flame_train.engine import Tensor
from flame_train.settings import Entry, Table

from .losses import NoiseLevel


class StepBatch(Protocol):
    """The micro-batch, as far as an objective asks. All lies on the device."""

    @property
    def size(self) -> int:
        """The number of samples."""

    def loss_weight(self) -> Tensor | None:
        """Returns the factors of masks and sets, fp32 (B, h, w, 1) or (B, 1, 1, 1); None: all are 1."""

    def conditioning(self, text: str = "", /) -> Mapping[str, Tensor]:
        """Returns what the network gets beside latents and timesteps, by name."""


class ObjectiveKind(Entry):
    """One objective: its fields are keys of `[loss]`.

    It runs on the device within the captured step: without a Python branch on a value, and reading none.
    """

    group: ClassVar[tuple[str, ...]] = ()
    """Of groups of images, such as ("win", "lose"): how their names end. NAME.win.png and NAME.lose.png then lie one
    behind the other in a batch, and have noise, noise level, caption and mirroring in common."""

    @abstractmethod
    def losses(
        self,
        prediction: Tensor,
        target: Tensor,
        noise: Tensor,
        level: NoiseLevel,
        batch: StepBatch,
        base: Callable[[], Tensor],
    ) -> Tensor:
        """Returns each sample's loss, (B,), or each group's, (B / len(group),).

        Args:
            prediction: what the network predicts, fp32 (B, H, W, C).
            target: what it should predict, fp32 (B, H, W, C).
            noise: the noise of the target (B, H, W, C).
            level: how noisy each sample is.
            batch: the micro-batch.
            base: gives the base model's prediction on the same input, fp32 (B, H, W, C), without a gradient.
        """


class Denoising(ObjectiveKind):
    """The distance to the target by `loss.kind`, times the weight of the noise level; see `TrainingObjective`."""

    name = "denoising"

    def losses(self, *arguments: Any, **named: Any) -> Tensor:
        """Is never asked: `TrainingObjective.losses`, which has the tables of weights, makes this loss."""
        raise AssertionError("the usual objective is asked for its loss; TrainingObjective makes that")


OBJECTIVES: Table[ObjectiveKind] = Table("objective", "what the loss is made of", [Denoising], Denoising.name)
