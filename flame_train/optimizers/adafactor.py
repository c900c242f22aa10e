"""Adafactor (arXiv 1804.04235), as transformers has it, with a learning rate from outside or its own, falling one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.fused import Kernel
from flame_train.optimizers import OptimizerKind
from flame_train.settings import field

from .factored import Moments, clipped, matrix_kernel, moments_of, rms


@dataclass(frozen=True, slots=True)
class AdafactorRule:
    """The gradient over the root of its factored second moment, clipped by its root mean square."""

    decay_rate: float
    clip_threshold: float
    beta1: float
    weight_decay: float
    scale_parameter: bool
    relative_step: bool
    warmup_init: bool
    name: str = "adafactor"
    elementwise: ClassVar[bool] = False
    moves: ClassVar[bool] = True

    def init(self, arena: FlatParameters) -> State:
        _ = arena.stacks  # made now: a captured step cannot
        momentum = {"exp_avg": arena.backend.xp.zeros(arena.size, float32)} if self.beta1 else {}
        return arena.matrices().zeros("exp_avg_sq") | momentum

    def numbers(self, state: State, step: Step) -> State:
        """Returns the second moment's decay, and the rate of `relative_step`: 1 / sqrt(step), at first less."""
        t = step.count.astype(np.float64) + 1.0
        relative = step.xp.minimum(t, 1.0)
        if self.relative_step:
            relative = step.xp.minimum(1e-6 * t if self.warmup_init else 1e-2, 1.0 / step.xp.sqrt(t))
        return {"decay": (1.0 - t**-self.decay_rate).astype(float32), "relative": relative.astype(float32)}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, arena, p = step.xp, step.arena, step.arena.values
        numbers = step.numbers_of(self, state)
        moments = Moments(xp, arena.matrices(), state, "exp_avg_sq")
        scaled, scales = xp.zeros_like(g), xp.ones_like(g)
        for i, stack in enumerate(arena.stacks):
            grads = stack.gather(xp, g)
            root = moments.inverse_root(grads * grads + np.float32(1e-30), i, numbers["decay"])
            stack.scatter(xp, scaled, clipped(xp, root * grads, self.clip_threshold))
            if self.scale_parameter:
                size = xp.maximum(rms(xp, stack.gather(xp, p)), np.float32(1e-3))
                stack.scatter(xp, scales, xp.broadcast_to(size, grads.shape))
        rates = step.rates * numbers["relative"] if self.relative_step else step.rates
        rates = rates * scales if self.scale_parameter else rates
        moved, changed = rates * scaled, moments.changed()
        if self.beta1:
            moved = self.beta1 * state["exp_avg"] + (1.0 - self.beta1) * moved
            changed["exp_avg"] = moved
        if self.weight_decay:
            decayed = self.weight_decay if arena.decay_scale is None else self.weight_decay * arena.decay_scale
            moved = moved + decayed * (rates * p)
        return moved, changed

    def kernel(self, arena: FlatParameters) -> Kernel:
        constants = {
            "THRESHOLD": self.clip_threshold,
            "BETA1": self.beta1,
            "WEIGHT_DECAY": self.weight_decay,
            "SCALED": self.scale_parameter,
        }
        text = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
        states = moments_of("exp_avg_sq") | {"exp_avg": float32}
        return matrix_kernel(arena, text, states=states, constants=constants)


class Adafactor(OptimizerKind):
    """With `relative_step`, `optimizer.lr` is a factor on the rate that it has by itself: 1."""

    name = "adafactor"
    aka = ("transformers.adafactor", "adafactorfused")

    decay_rate: float = field(0.8, "how fast the second moment forgets: 1 - step^-decay_rate", gt=0, le=1)
    clip_threshold: float = field(1.0, "largest root mean square of a matrix's update", gt=0, le=1000)
    beta1: float = field(0.0, "decay of the first moment; 0: none", ge=0, lt=1)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)
    scale_parameter: bool = field(False, "the rate of a matrix is multiplied by its root mean square, 0.001 at least")
    relative_step: bool = field(False, "the rate is 1 / sqrt(step), 0.01 at most, times optimizer.lr, which is 1")
    warmup_init: bool = field(False, "relative_step's rate is at most a millionth of the step")

    @property
    def lr_is_factor(self) -> bool:
        return self.relative_step

    def problems(self, config: Any) -> Mapping[str, str]:
        if self.warmup_init and not self.relative_step:
            return {"warmup_init": "expected optimizer.relative_step = true with it: it warms up that rate"}
        return {}

    def rule(self) -> AdafactorRule:
        return AdafactorRule(
            self.decay_rate,
            self.clip_threshold,
            self.beta1,
            self.weight_decay,
            self.scale_parameter,
            self.relative_step,
            self.warmup_init,
        )
