"""The squared error."""

from __future__ import annotations

from flame_train.engine import Tensor
from flame_train.engine import functional as F

from .kind import LossKind, NoiseLevel


class Mse(LossKind):
    name = "mse"

    def errors(self, prediction: Tensor, target: Tensor, level: NoiseLevel) -> Tensor:
        error: Tensor = F.mse_loss(prediction, target, reduction="none")
        return error
