"""Losses that a config can choose: each is one file of this folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from flame_train.engine import Tensor
from flame_train.settings import Entry, Table, entries_in


@dataclass(frozen=True, slots=True)
class NoiseLevel:
    """How noisy each sample is, for losses that depend on it. Each is computed on first use.

    Attributes:
        time: the place between image (0) and pure noise (1), (B,) fp32.
        sigma: noise over signal, (B,) fp32; infinite where no signal is left.
    """

    time: Callable[[], Tensor]
    sigma: Callable[[], Tensor]


class LossKind(Entry):
    """One distance between prediction and target: its fields are keys of `[loss]`."""

    @abstractmethod
    def errors(self, prediction: Tensor, target: Tensor, level: NoiseLevel) -> Tensor:
        """Returns each element's error, fp32 (B, H, W, C), for fp32 tensors of this shape."""


LOSSES: Table[LossKind] = Table("kind", "loss function", entries_in(__name__, LossKind), "mse", aka=("loss_type",))
