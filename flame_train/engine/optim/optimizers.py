"""The last transform of a chain: from a gradient to the update, which the learning rate multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..dtype import Array, float32
from .flat_parameters import FlatParameters
from .transform import State, Step, check


def bias_corrections(betas: tuple[float, float], step: Step) -> State:
    """Returns the divisors of the `first` moment and of the root of the `second`, 0-d fp32."""
    b1, b2 = betas
    t = step.count.astype(np.float64) + 1.0
    return {"first": (1.0 - b1**t).astype(float32), "second": step.xp.sqrt(1.0 - b2**t).astype(float32)}


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """Adam with decoupled weight decay (arXiv 1711.05101) and bias correction, as torch.optim.AdamW."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    name: str = "adamw"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise TypeError(f"adamw: expected two betas, got {self.betas!r}")
        first, second = self.betas
        check("adamw", below=1.0, beta1=first, beta2=second)
        check("adamw", eps=self.eps, weight_decay=self.weight_decay)

    def init(self, arena: FlatParameters) -> State:
        xp = arena.backend.xp
        return {"exp_avg": xp.zeros(arena.size, float32), "exp_avg_sq": xp.zeros(arena.size, float32)}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        direction, after = self._direction(g, state, step)
        return decayed(direction, self.weight_decay, step.arena), after

    def _direction(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        """Returns the corrected mean over the root of the corrected mean square, and the state after it."""
        xp, (b1, b2) = step.xp, self.betas
        numbers = step.numbers_of(self, state)
        first, second = numbers["first"], numbers["second"]
        m = b1 * state["exp_avg"] + (1.0 - b1) * g
        v = b2 * state["exp_avg_sq"] + (1.0 - b2) * (g * g)
        return m / (first * (xp.sqrt(v) / second + self.eps)), {"exp_avg": m, "exp_avg_sq": v}

    def numbers(self, state: State, step: Step) -> State:
        return bias_corrections(self.betas, step)


@dataclass(frozen=True, slots=True)
class AdamRule(AdamWRule):
    """Adam (arXiv 1412.6980): weight decay is added to the gradient, as in torch.optim.Adam."""

    weight_decay: float = 0.0
    name: str = "adam"

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        return self._direction(decayed(g, self.weight_decay, step.arena), state, step)


@dataclass(frozen=True, slots=True)
class SGDRule:
    """Gradient descent with momentum and coupled weight decay, as torch.optim.SGD."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    name: str = "sgd"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check("sgd", momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("sgd: nesterov needs a momentum above 0 and a dampening of 0")

    def init(self, arena: FlatParameters) -> State:
        if self.momentum == 0.0:
            return {}
        return {"momentum": arena.backend.xp.zeros(arena.size, float32)}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        g = decayed(g, self.weight_decay, step.arena)
        if self.momentum == 0.0:
            return g, {}
        factor = step.numbers_of(self, state)["gradient_factor"]
        buffer = self.momentum * state["momentum"] + factor * g
        return (g + self.momentum * buffer if self.nesterov else buffer), {"momentum": buffer}

    def numbers(self, state: State, step: Step) -> State:
        """The factor of the gradient in the new momentum, as `gradient_factor`: 1 - dampening, at first 1; 0-d fp32."""
        return {"gradient_factor": step.xp.where(step.count == 0, np.float32(1.0), np.float32(1.0 - self.dampening))}


def decayed(g: Array, weight_decay: float, arena: FlatParameters) -> Array:
    """g + weight_decay * values, with the arena's `decay_scale`."""
    if weight_decay == 0.0:
        return g
    factor: Any = weight_decay if arena.decay_scale is None else weight_decay * arena.decay_scale
    return g + factor * arena.values
