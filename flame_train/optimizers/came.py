"""CAME (arXiv 2307.02047): Adafactor with a momentum, and confidence in it, as pytorch-optimizer has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.optimizers import decayed
from flame_train.settings import field

from .betas import betas_problem
from .factored import clipped, inverse_root, zeros
from .kind import OptimizerKind


@dataclass(frozen=True, slots=True)
class CameRule:
    """The momentum over the root of a factored moment of how far updates are from it."""

    betas: tuple[float, float, float]
    clip_threshold: float
    weight_decay: float
    name: str = "came"
    elementwise: ClassVar[bool] = False

    def init(self, arena: FlatParameters) -> State:
        momentum = {"exp_avg": arena.backend.xp.zeros(arena.size, float32)}
        residuals = {n: a for n, a in zeros(arena, "exp_avg_res").items() if "whole" not in n}
        return momentum | zeros(arena, "exp_avg_sq") | residuals

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, (b1, b2, b3) = step.xp, self.betas
        direction, momentum, changed = xp.zeros_like(g), xp.zeros_like(g), State()
        for i, stack in enumerate(step.arena.stacks):
            own = stack.take(xp, g)
            root, moments = inverse_root(xp, own * own + np.float32(1e-30), state, "exp_avg_sq", i, b2)
            update = clipped(xp, root * own, self.clip_threshold)
            m = b1 * stack.take(xp, state["exp_avg"]) + (1.0 - b1) * update
            changed |= moments
            stack.put(xp, momentum, m)
            if len(stack.shape) > 1:
                residual = (update - m) ** 2 + np.float32(1e-16)
                root, moments = inverse_root(xp, residual, state, "exp_avg_res", i, b3)
                changed |= moments
                m = root * m
            stack.put(xp, direction, m)
        return decayed(direction, self.weight_decay, step.arena), changed | {"exp_avg": momentum}


class Came(OptimizerKind):
    name = "came"
    aka = ("came8bit",)

    came_betas: tuple[float, float, float] = field(
        (0.9, 0.999, 0.9999), "decay of the momentum, of the second moment and of the confidence"
    )
    clip_threshold: float = field(1.0, "largest root mean square of a matrix's update", gt=0, le=1000)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)

    def problems(self, config: Any) -> Mapping[str, str]:
        return betas_problem(self.came_betas, "came_betas")

    def rule(self) -> CameRule:
        return CameRule(self.came_betas, self.clip_threshold, self.weight_decay)
