"""Gradient descent with momentum, as torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flame_train.engine.optim import SGDRule
from flame_train.optimizers import OptimizerKind
from flame_train.settings import field


class Sgd(OptimizerKind):
    name = "sgd"

    momentum: float = field(0.0, "momentum", ge=0, lt=1)
    weight_decay: float = field(0.01, "weight decay, added to the gradient", ge=0, le=1)

    nesterov: bool = field(False, "Nesterov's momentum, which looks a step ahead")

    def problems(self, config: Any) -> Mapping[str, str]:
        if not self.nesterov or self.momentum > 0:
            return {}
        return {"nesterov": "expected optimizer.momentum above 0 with it"}

    def rule(self) -> SGDRule:
        return SGDRule(momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov)
