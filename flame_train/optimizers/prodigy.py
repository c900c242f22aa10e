"""Prodigy (arXiv 2306.06101): Adam that finds its own learning rate d, as prodigyopt has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.optimizers import decayed
from flame_train.engine.optim.transform import settled, singles
from flame_train.optimizers import OptimizerKind, betas_problem
from flame_train.settings import field


@dataclass(frozen=True, slots=True)
class ProdigyRule:
    """Adam's step times d, the largest estimate so far of the distance to the solution.

    The estimate is `d_coef r / |s|`. Here r averages `(d / d0) d lr <g, p0 - p>`, and s averages `(d / d0) d lr g`.
    A step at a learning rate of 0 changes nothing. One that has seen no gradient yet leaves d alone.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    d0: float
    d_coef: float
    growth_rate: float
    use_bias_correction: bool
    safeguard_warmup: bool
    name: str = "prodigy"
    elementwise: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("d",)

    def init(self, arena: FlatParameters) -> State:
        xp = arena.backend.xp
        flat = {name: xp.zeros(arena.size, float32) for name in ("exp_avg", "exp_avg_sq", "s")}
        single = {"d": self.d0, "d_max": self.d0, "d_numerator": 0.0, "k": 0.0}
        return (
            flat
            | {"p0": arena.values.copy()}
            | {name: xp.full((), value, np.float64) for name, value in single.items()}
        )

    def numbers(self, state: State, step: Step) -> State:
        """Returns the gradient's factors in the moments and in s."""
        d = state["d"]
        weight = (d / self.d0) * (d if self.safeguard_warmup else self._dlr(step, state))
        return {
            "in_first": (d * (1.0 - self.betas[0])).astype(float32),
            "in_second": (d * d * (1.0 - self.betas[1])).astype(float32),
            "in_s": weight.astype(float32),
        }

    def terms(self, g: Array, state: State, step: Step) -> tuple[State, State]:
        assert step.rate is not None
        assert step.numbers is not None
        s = math.sqrt(self.betas[1]) * state["s"] + step.numbers["in_s"] * g
        inner = g * (state["p0"] - step.arena.values)
        return {"inner": inner, "size": step.xp.abs(s)}, {"s": step.xp.where(step.rate > 0, s, state["s"])}

    def conclude(self, state: State, step: Step) -> State:
        assert step.rate is not None
        assert step.sums is not None
        xp, d, size = step.xp, state["d"], step.sums["size"]
        grown = (d / self.d0) * self._dlr(step, state) * step.sums["inner"]
        numerator = math.sqrt(self.betas[1]) * state["d_numerator"] + grown
        moved = (step.rate > 0) & (size > 0)
        d_new, d_max = self._estimate(xp, state, self.d_coef * numerator / xp.where(moved, size, 1.0))
        changed = {"d": d_new, "d_max": d_max, "d_numerator": numerator, "k": state["k"] + 1.0}
        return {name: xp.where(moved, new, state[name]) for name, new in changed.items()} | {
            "moved": moved.astype(float32),
            "floor": (d_new * self.eps).astype(float32),
            "factor": (d * self._bias(xp, state["k"])).astype(float32),
        }

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        step, changed = settled(self, g, state, step)
        assert step.rate is not None
        assert step.numbers is not None
        xp, (b1, b2), numbers, live = step.xp, self.betas, step.numbers, step.rate > 0
        m = b1 * state["exp_avg"] + numbers["in_first"] * g
        v = b2 * state["exp_avg_sq"] + numbers["in_second"] * (g * g)
        direction = decayed(m / (xp.sqrt(v) + numbers["floor"]), self.weight_decay, step.arena)
        changed |= {n: xp.where(live, new, state[n]) for n, new in {"exp_avg": m, "exp_avg_sq": v}.items()}
        moved = xp.where(numbers["moved"] > 0, numbers["factor"] * direction, np.float32(0.0))
        return moved, changed | singles(state, numbers)

    def _dlr(self, step: Step, state: State) -> Any:
        assert step.rate is not None
        return state["d"] * step.rate.astype(np.float64) * self._bias(step.xp, state["k"])

    def _bias(self, xp: Namespace, k: Array) -> Any:
        if not self.use_bias_correction:
            return 1.0
        return xp.sqrt(1.0 - self.betas[1] ** (k + 1.0)) / (1.0 - self.betas[0] ** (k + 1.0))

    def _estimate(self, xp: Namespace, state: State, d_hat: Array) -> tuple[Array, Array]:
        """Returns the new d and the largest estimate; d grows by `growth_rate` at most, but for its first growth."""
        d = xp.where(state["d"] == self.d0, xp.maximum(state["d"], d_hat), state["d"])
        d_max = xp.maximum(state["d_max"], d_hat)
        return (xp.minimum(d_max, d * self.growth_rate) if self.growth_rate else d_max), d_max


class Prodigy(OptimizerKind):
    """`optimizer.lr` is a factor on the rate that it finds: 1, with schedule.name = "cosine" or "constant"."""

    name = "prodigy"
    finds_rate = True
    aka = (
        "prodigyopt",
        "dadaptation",
        "dadaptadam",
        "dadaptadampreprint",
        "dadaptlion",
        "prodigy8bit",
    )

    betas: tuple[float, float] = field((0.9, 0.999), "decay of the two moments")
    eps: float = field(1e-8, "added to the denominator", gt=0, le=1)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)
    d0: float = field(1e-6, "first estimate of the learning rate", gt=0, le=1)
    d_coef: float = field(1.0, "factor of the estimate: 0.5 to 2 are usual", gt=0, le=100)
    growth_rate: float = field(0.0, "the most by which the estimate grows in a step, such as 1.02; 0: any", ge=0)
    use_bias_correction: bool = field(False, "Adam's correction of the first steps")
    safeguard_warmup: bool = field(False, "leaves a warm-up's small rates out of the estimate")

    def problems(self, config: Any) -> Mapping[str, str]:
        wrong = dict(betas_problem(self.betas))
        if 0 < self.growth_rate <= 1:
            wrong["growth_rate"] = f"expected 0, which is any, or a number above 1, got {self.growth_rate}"
        return wrong

    def rule(self) -> ProdigyRule:
        return ProdigyRule(
            self.betas,
            self.eps,
            self.weight_decay,
            self.d0,
            self.d_coef,
            self.growth_rate,
            self.use_bias_correction,
            self.safeguard_warmup,
        )
