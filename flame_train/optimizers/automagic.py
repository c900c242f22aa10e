"""Automagic, ai-toolkit's: Adafactor's update with a learning rate for each value, which its sign's constancy moves.

Source: github.com/ostris/ai-toolkit, toolkit/optimizers/automagic.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, bool_, float32, uint8
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.fused import Kernel
from flame_train.optimizers import OptimizerKind
from flame_train.settings import field

from .factored import Moments, clipped, matrix_kernel, moments_of

_TOP = 127
"""The number that stands for a parameter's largest rate: rates are kept in 8 bits, signs left out."""


@dataclass(frozen=True, slots=True)
class AutomagicRule:
    """A value's rate grows by `bump` where its update has the sign of the last one, and falls by it where not.

    The first update is compared with "not above 0". Of each parameter the rates are kept as shares of their largest.
    """

    start_lr: float
    smallest: float
    largest: float
    bump: float
    beta2: float
    clip_threshold: float
    weight_decay: float
    name: str = "automagic"
    elementwise: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("avg_lr",)

    def init(self, arena: FlatParameters) -> State:
        _ = arena.stacks  # made now: a captured step cannot
        xp, matrices = arena.backend.xp, arena.matrices()
        unit = np.float32(np.float64(np.float32(self.start_lr)) / _TOP)
        return {
            "rates": xp.full(arena.size, _TOP, uint8),
            "unit": xp.full((1, matrices.count), unit, float32),
            "above": xp.zeros(arena.size, bool_),
            "avg_lr": xp.full((), self.start_lr, np.float64),
            **matrices.zeros("exp_avg_sq"),
        }

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def conclude(self, state: State, step: Step) -> State:
        assert step.sums is not None
        return {"avg_lr": step.sums["mean"] * (1.0 / len(step.arena.segments))}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, arena = step.xp, step.arena
        moments = Moments(xp, arena.matrices(), state, "exp_avg_sq")
        moved, above, codes = xp.zeros_like(g), xp.zeros_like(state["above"]), xp.zeros_like(state["rates"])
        units, total, first = [], xp.zeros((), np.float64), 0
        for i, stack in enumerate(arena.stacks):
            grads = stack.gather(xp, g)
            count, beside = len(grads), (-1, *[1] * len(stack.shape))
            root = moments.inverse_root(grads * grads + np.float32(1e-30), i, self.beta2)
            update = clipped(xp, root * grads, self.clip_threshold)
            before = state["unit"][0, first : first + count].reshape(beside)
            rates, positive = self._rates(
                xp, stack.gather(xp, state["rates"]), before, stack.gather(xp, state["above"]), update
            )
            most = rates.max(tuple(range(1, rates.ndim)), keepdims=True)
            unit = (most.astype(np.float64) / _TOP).astype(float32)
            stack.scatter(xp, codes, xp.rint(rates / unit).clip(0, _TOP).astype(uint8))
            stack.scatter(xp, above, positive)
            stack.scatter(xp, moved, rates * (update + np.float32(self.weight_decay) * self._decayed(stack, step)))
            units.append(unit.reshape(1, count))
            total = total + rates.mean(tuple(range(1, rates.ndim)), dtype=np.float64).sum()
            first += count
        changed = {"rates": codes, "above": above, "unit": xp.concatenate(units, axis=1)} | moments.changed()
        step_ = Step(xp, arena, step.count, sums={"mean": total})
        return step.rates * moved, changed | self.conclude(state, step_)

    def _rates(self, xp: Any, codes: Array, unit: Array, above: Array, update: Array) -> tuple[Array, Array]:
        old, positive = codes.astype(float32) * unit, update > 0
        bump = np.float32(self.bump)
        rates = xp.where(positive == above, old + bump, old - bump)
        return rates.clip(np.float32(self.smallest), np.float32(self.largest)), positive

    @staticmethod
    def _decayed(stack: Any, step: Step) -> Array:
        """Returns the values, with the factors on weight decay."""
        scale, p = step.arena.decay_scale, step.arena.values
        decayed: Array = stack.gather(step.xp, p if scale is None else scale * p)
        return decayed

    def kernel(self, arena: FlatParameters) -> Kernel:
        constants = {
            "THRESHOLD": self.clip_threshold,
            "WEIGHT_DECAY": self.weight_decay,
            "BETA2": self.beta2,
            "ONE_MINUS_BETA2": 1.0 - self.beta2,
            "BUMP": self.bump,
            "SMALLEST": self.smallest,
            "LARGEST": self.largest,
        }
        text = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
        states = moments_of("exp_avg_sq") | {"rates": uint8, "unit": float32, "above": bool_}
        return matrix_kernel(arena, text, states=states, constants=constants, sums=("mean",))


class Automagic(OptimizerKind):
    """`optimizer.lr` is a factor on all rates: 1. `avg_lr` in the log is their mean."""

    name = "automagic"
    finds_rate = True
    aka = ("automagic2", "automagic3")

    start_lr: float = field(1e-6, "every value's learning rate at first", gt=0, le=1e-3)
    smallest_lr: float = field(1e-7, "the least that a value's rate falls to", gt=0, le=1)
    largest_lr: float = field(1e-3, "the most that a value's rate grows to", gt=0, le=1, aka=("max_lr",))
    lr_bump: float = field(1e-6, "by how much a value's rate moves in a step", gt=0, le=1)
    beta2: float = field(0.999, "decay of the second moment", ge=0, lt=1)
    clip_threshold: float = field(1.0, "largest root mean square of a matrix's update", gt=0, le=1000)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)

    def problems(self, config: Any) -> Mapping[str, str]:
        if self.smallest_lr > self.largest_lr:
            return {"smallest_lr": f"expected at most optimizer.largest_lr ({self.largest_lr}), got {self.smallest_lr}"}
        return {}

    def rule(self) -> AutomagicRule:
        return AutomagicRule(
            self.start_lr,
            self.smallest_lr,
            self.largest_lr,
            self.lr_bump,
            self.beta2,
            self.clip_threshold,
            self.weight_decay,
        )
