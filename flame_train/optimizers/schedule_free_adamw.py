"""Schedule-free AdamW (arXiv 2405.15682), as schedulefree's `AdamWScheduleFree`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.optimizers import decayed
from flame_train.engine.optim.transform import singles
from flame_train.optimizers import OptimizerKind, averaging_problem
from flame_train.settings import field


@dataclass(frozen=True, slots=True)
class ScheduleFreeAdamWRule:
    """Gradients are taken at y, between a fast sequence z and its average x; the values of the arena are y.

    The average is weighted by the square of the largest rate so far, so that a warm-up counts little.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    name: str = "schedule_free_adamw"
    elementwise: ClassVar[bool] = True
    moves: ClassVar[bool] = True

    def init(self, arena: FlatParameters) -> State:
        xp = arena.backend.xp
        return {
            "z": arena.values.copy(),
            "exp_avg_sq": xp.zeros(arena.size, float32),
            "weight_sum": xp.zeros((), np.float64),
            "lr_max": xp.zeros((), np.float64),
        }

    def numbers(self, state: State, step: Step) -> State:
        """Returns how far y is pulled to z, its share of z's step, and the second moment's bias correction."""
        assert step.rate is not None
        xp, (b1, b2) = step.xp, self.betas
        lr_max = xp.maximum(step.rate.astype(np.float64), state["lr_max"])
        weight = lr_max * lr_max
        total = state["weight_sum"] + weight
        share = xp.where(total > 0, weight / xp.where(total > 0, total, 1.0), 0.0)
        return {
            "pull": share.astype(float32),
            "along": (1.0 - b1 * (1.0 - share)).astype(float32),
            "second": (1.0 - b2 ** (step.count.astype(np.float64) + 1.0)).astype(float32),
            "weight_sum": total,
            "lr_max": lr_max,
        }

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, b2, y, z = step.xp, self.betas[1], step.arena.values, state["z"]
        numbers = step.numbers_of(self, state)
        v = b2 * state["exp_avg_sq"] + (1.0 - b2) * (g * g)
        direction = decayed(g / (xp.sqrt(v / numbers["second"]) + self.eps), self.weight_decay, step.arena)
        moved = numbers["pull"] * (y - z) + numbers["along"] * step.rates * direction
        return moved, {"z": z - step.rates * direction, "exp_avg_sq": v} | singles(state, numbers)

    def evaluated(self, values: Array, state: State) -> Array:
        """Returns the average x, of which y = (1 - b1) z + b1 x."""
        share = np.float32(1.0 - 1.0 / self.betas[0])
        return values + share * (state["z"] - values)


class ScheduleFreeAdamW(OptimizerKind):
    """The run saves and samples with the average."""

    name = "schedule_free_adamw"
    averages = True
    aka = ("adamwschedulefree", "schedulefree", "adamw_schedule_free", "schedule_free", "radamschedulefree")

    betas: tuple[float, float] = field((0.9, 0.999), "decay of the two moments")
    eps: float = field(1e-8, "added to the denominator", gt=0, le=1)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)

    def problems(self, config: Any) -> Mapping[str, str]:
        return averaging_problem(self.betas)

    def rule(self) -> ScheduleFreeAdamWRule:
        return ScheduleFreeAdamWRule(self.betas, self.eps, self.weight_decay)
