"""CAME (arXiv 2307.02047): Adafactor with a momentum, and confidence in it, as pytorch-optimizer has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.fused import Kernel
from flame_train.engine.optim.optimizers import decayed
from flame_train.optimizers import OptimizerKind, betas_problem
from flame_train.settings import field

from .factored import Moments, clipped, matrix_kernel, moments_of


@dataclass(frozen=True, slots=True)
class CameRule:
    """The momentum over the root of a factored moment of how far updates are from it."""

    betas: tuple[float, float, float]
    clip_threshold: float
    weight_decay: float
    name: str = "came"
    elementwise: ClassVar[bool] = False

    def init(self, arena: FlatParameters) -> State:
        _ = arena.stacks  # made now: a captured step cannot
        matrices, momentum = arena.matrices(), arena.backend.xp.zeros(arena.size, float32)
        confidence = {n: a for n, a in matrices.zeros("exp_avg_res").items() if "whole" not in n}
        return {"exp_avg": momentum} | matrices.zeros("exp_avg_sq") | confidence

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, (b1, b2, b3) = step.xp, self.betas
        matrices = step.arena.matrices()
        squares, residuals = (Moments(xp, matrices, state, name) for name in ("exp_avg_sq", "exp_avg_res"))
        direction, momentum = xp.zeros_like(g), xp.zeros_like(g)
        for i, stack in enumerate(step.arena.stacks):
            grads = stack.gather(xp, g)
            root = squares.inverse_root(grads * grads + np.float32(1e-30), i, b2)
            update = clipped(xp, root * grads, self.clip_threshold)
            m = b1 * stack.gather(xp, state["exp_avg"]) + (1.0 - b1) * update
            stack.scatter(xp, momentum, m)
            if matrices.is_cut(i):
                m = residuals.inverse_root((update - m) ** 2 + np.float32(1e-16), i, b3) * m
            stack.scatter(xp, direction, m)
        changed = {"exp_avg": momentum} | squares.changed() | residuals.changed()
        return decayed(direction, self.weight_decay, step.arena), changed

    def kernel(self, arena: FlatParameters) -> Kernel:
        b1, b2, b3 = self.betas
        constants = {
            "THRESHOLD": self.clip_threshold,
            "WEIGHT_DECAY": self.weight_decay,
            "BETA1": b1,
            "BETA2": b2,
            "BETA3": b3,
            "ONE_MINUS_BETA1": 1.0 - b1,
            "ONE_MINUS_BETA2": 1.0 - b2,
            "ONE_MINUS_BETA3": 1.0 - b3,
        }
        text = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
        states = moments_of("exp_avg_sq", "exp_avg_res") | {"exp_avg": float32}
        return matrix_kernel(arena, text, pairs=2, states=states, constants=constants)


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
