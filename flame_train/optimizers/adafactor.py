"""Adafactor (arXiv 1804.04235) with a learning rate from outside, as transformers has it without `relative_step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.settings import field

from .factored import clipped, inverse_root, rms, zeros
from .kind import OptimizerKind


@dataclass(frozen=True, slots=True)
class AdafactorRule:
    """The gradient over the root of its factored second moment, clipped by its root mean square."""

    decay_rate: float
    clip_threshold: float
    beta1: float
    weight_decay: float
    scale_parameter: bool
    name: str = "adafactor"
    elementwise: ClassVar[bool] = False
    moves: ClassVar[bool] = True

    def init(self, arena: FlatParameters) -> State:
        momentum = {"exp_avg": arena.backend.xp.zeros(arena.size, float32)} if self.beta1 else {}
        return zeros(arena, "exp_avg_sq") | momentum

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, arena, p = step.xp, step.arena, step.arena.values
        decay = (1.0 - (step.count.astype(np.float64) + 1.0) ** -self.decay_rate).astype(float32)
        scaled, scales, changed = xp.zeros_like(g), xp.ones_like(g), State()
        for i, stack in enumerate(arena.stacks):
            own = stack.take(xp, g)
            root, moments = inverse_root(xp, own * own + np.float32(1e-30), state, "exp_avg_sq", i, decay)
            stack.put(xp, scaled, clipped(xp, root * own, self.clip_threshold))
            changed |= moments
            if self.scale_parameter:
                size = xp.maximum(rms(xp, stack.take(xp, p)), np.float32(1e-3))
                stack.put(xp, scales, xp.broadcast_to(size, own.shape))
        rates = step.rates * scales if self.scale_parameter else step.rates
        moved = rates * scaled
        if self.beta1:
            moved = self.beta1 * state["exp_avg"] + (1.0 - self.beta1) * moved
            changed["exp_avg"] = moved
        if self.weight_decay:
            decayed = self.weight_decay if arena.decay_scale is None else self.weight_decay * arena.decay_scale
            moved = moved + decayed * (rates * p)
        return moved, changed


class Adafactor(OptimizerKind):
    """Its `relative_step`, by which other trainers have it find its rate, is not here: `optimizer.lr` is the rate."""

    name = "adafactor"
    aka = ("transformers.adafactor", "adafactorfused")

    decay_rate: float = field(0.8, "how fast the second moment forgets: 1 - step^-decay_rate", gt=0, le=1)
    clip_threshold: float = field(1.0, "largest root mean square of a matrix's update", gt=0, le=1000)
    beta1: float = field(0.0, "decay of the first moment; 0: none", ge=0, lt=1)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)
    scale_parameter: bool = field(False, "the rate of a matrix is multiplied by its root mean square, 0.001 at least")

    def rule(self) -> AdafactorRule:
        return AdafactorRule(self.decay_rate, self.clip_threshold, self.beta1, self.weight_decay, self.scale_parameter)
