"""Lion (arXiv 2302.06675): the sign of a momentum, as lion-pytorch has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.optimizers import decayed
from flame_train.optimizers import OptimizerKind, betas_problem
from flame_train.settings import field


@dataclass(frozen=True, slots=True)
class LionRule:
    """sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g; weight decay is decoupled."""

    betas: tuple[float, float]
    weight_decay: float
    name: str = "lion"
    elementwise: ClassVar[bool] = True

    def init(self, arena: FlatParameters) -> State:
        return {"exp_avg": arena.backend.xp.zeros(arena.size, float32)}

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        (b1, b2), m = self.betas, state["exp_avg"]
        direction = step.xp.sign(b1 * m + (1.0 - b1) * g)
        return decayed(direction, self.weight_decay, step.arena), {"exp_avg": b2 * m + (1.0 - b2) * g}


class Lion(OptimizerKind):
    name = "lion"
    aka = ("lion8bit", "pagedlion8bit")

    betas: tuple[float, float] = field((0.9, 0.99), "decay of the two moments")
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)

    def problems(self, config: Any) -> Mapping[str, str]:
        return betas_problem(self.betas)

    def rule(self) -> LionRule:
        return LionRule(self.betas, self.weight_decay)
