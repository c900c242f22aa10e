"""AdamW (arXiv 1711.05101), as torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flame_train.engine.optim import AdamWRule
from flame_train.optimizers import OptimizerKind, betas_problem
from flame_train.settings import field


class AdamW(OptimizerKind):
    name = "adamw"

    betas: tuple[float, float] = field((0.9, 0.999), "decay of the two moments", aka=("adam_beta1", "adam_beta2"))
    eps: float = field(1e-8, "added to the denominator", gt=0, le=1, aka=("adam_epsilon",))
    weight_decay: float = field(
        0.01, "weight decay, decoupled from the gradient", ge=0, le=1, aka=("adam_weight_decay",)
    )

    def problems(self, config: Any) -> Mapping[str, str]:
        return betas_problem(self.betas)

    def rule(self) -> AdamWRule:
        return AdamWRule(self.betas, self.eps, self.weight_decay)
