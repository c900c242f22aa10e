"""The squared error."""

from __future__ import annotations

from flame_train.diffusion.losses import LossKind, NoiseLevel
from flame_train.engine import Tensor
from flame_train.engine import functional as F


class Mse(LossKind):
    name = "mse"

    def errors(self, prediction: Tensor, target: Tensor, level: NoiseLevel) -> Tensor:
        error: Tensor = F.mse_loss(prediction, target, reduction="none")
        return error
