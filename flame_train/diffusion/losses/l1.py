"""The absolute error."""

from __future__ import annotations

from flame_train.diffusion.losses import LossKind, NoiseLevel
from flame_train.engine import Tensor
from flame_train.engine import functional as F


class L1(LossKind):
    name = "l1"

    def errors(self, prediction: Tensor, target: Tensor, level: NoiseLevel) -> Tensor:
        error: Tensor = F.l1_loss(prediction, target, reduction="none")
        return error
