"""Prodigy over schedule-free AdamW, as prodigy-plus-schedule-free's `ProdigyPlusScheduleFree` has it by default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.fused import Kernel
from flame_train.engine.optim.matrices import MatrixShape
from flame_train.engine.optim.transform import singles
from flame_train.optimizers import OptimizerKind, averaging_problem
from flame_train.settings import field

from .factored import Moments, matrix_kernel, moments_of, rms

_EVERY = 11
"""d is estimated from every so many'th value of each parameter."""


def first_two(shape: tuple[int, ...]) -> MatrixShape | None:
    """The first two dims are rows and columns, a convolution's window the inner one; small parameters are no matrices.

    The published implementation takes the two largest dims. These are the same where rank and channels are larger than
    the window.
    """
    if len(shape) < 2 or max(shape) < 32:
        return None
    return MatrixShape(1, shape[0], shape[1], math.prod(shape[2:]))


def whole(shape: tuple[int, ...]) -> None:
    """No parameter is cut: each value has a moment of its own."""


@dataclass(frozen=True, slots=True)
class ProdigyScheduleFreeRule:
    """Gradients are taken at y, between a fast sequence z and its average x; the values of the arena are y.

    Updates are scaled by 1 / sqrt of their root mean square, if that is above 1. The values that d is estimated from
    are kept in fp32; the published implementation keeps them in bfloat16.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    d0: float
    d_coef: float
    d_limiter: bool
    schedulefree_c: float
    factored: bool
    use_stableadamw: bool
    name: str = "prodigy_schedule_free"
    elementwise: ClassVar[bool] = False
    moves: ClassVar[bool] = True
    shown: ClassVar[tuple[str, ...]] = ("d",)

    @property
    def _cut(self) -> Any:
        return first_two if self.factored else whole

    def init(self, arena: FlatParameters) -> State:
        xp, places = arena.backend.xp, _sliced(arena)
        single = {"d": self.d0, "d_numerator": 0.0, "weight_sum": 0.0}
        _ = arena.stacks  # made now: a captured step cannot
        return {
            "z": arena.values.copy(),
            "p0": arena.values[places],
            "s": xp.zeros(places.shape, float32),
            "places": places,
            **arena.matrices(self._cut).zeros("exp_avg_sq"),
            **{name: xp.full((), value, np.float64) for name, value in single.items()},
        }

    def numbers(self, state: State, step: Step) -> State:
        """Returns d as it is, the weights of the moments and of z, and that of this step's gradient in the estimate."""
        assert step.rate is not None
        xp, (b1, b2), d = step.xp, self.betas, state["d"]
        weight = (d * step.rate.astype(np.float64)) ** 2
        total = state["weight_sum"] + weight
        share = xp.where(total > 0, weight / xp.where(total > 0, total, 1.0), 0.0)
        if self.schedulefree_c:
            share = xp.minimum(share * ((1.0 - b1) * self.schedulefree_c), 1.0)
        return {
            "d_now": d.astype(float32),
            "fresh": (d * d * (1.0 - b2)).astype(float32),
            "floor": (d * self.eps).astype(float32),
            "in_s": (d * d * (1.0 / math.sqrt(self.d0))).astype(float32),
            "pull": share.astype(float32),
            "along": (1.0 - b1 * (1.0 - share)).astype(float32),
            "weight_sum": total,
        }

    def conclude(self, state: State, step: Step) -> State:
        """Returns the next d, from <g, p0 - z> and |s| of the sliced values."""
        assert step.sums is not None
        xp, d, inner, size = step.xp, state["d"], step.sums["inner"], step.sums["size"]
        numerator = math.sqrt(self.betas[1]) * state["d_numerator"]
        numerator = xp.where((d > self.d0) | (inner > 0), numerator + inner, numerator)
        ratio = numerator / xp.where(size > 0, size, 1.0)
        if self.d_limiter:
            ratio = xp.minimum(d * 2.0**0.25, ratio)
        return {"d": xp.where(size > 0, xp.maximum(d, ratio * self.d_coef), d), "d_numerator": numerator}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, arena, y, z = step.xp, step.arena, step.arena.values, state["z"]
        numbers = step.numbers_of(self, state)
        u, changed = self._scaled(g, state, step, numbers)
        sliced, at = g[state["places"]], z[state["places"]]
        s = np.float32(math.sqrt(self.betas[1])) * state["s"] + numbers["in_s"] * sliced
        inner = numbers["in_s"] * (sliced * (state["p0"] - at))
        sums = {"inner": xp.sum(inner, dtype=np.float64), "size": xp.sum(xp.abs(s), dtype=np.float64)}
        concluded = self.conclude(state, Step(xp, arena, step.count, sums=sums))
        if self.weight_decay:
            scale = arena.decay_scale
            u = u + (self.weight_decay if scale is None else self.weight_decay * scale) * y
        rates = step.rates * numbers["d_now"]
        moved = numbers["pull"] * (y - z) + numbers["along"] * rates * u
        return moved, {"z": z - rates * u, "s": s} | changed | singles(state, numbers | concluded)

    def _scaled(self, g: Array, state: State, step: Step, numbers: State) -> tuple[Array, State]:
        xp, arena = step.xp, step.arena
        moments = Moments(xp, arena.matrices(self._cut), state, "exp_avg_sq")
        scaled = xp.zeros_like(g)
        for i, stack in enumerate(arena.stacks):
            grads = stack.gather(xp, g)
            root = self._root(xp, grads, moments, i, self._cut(stack.shape), numbers["fresh"])
            update = grads * numbers["d_now"] / (root + numbers["floor"])
            if self.use_stableadamw:
                update = update / xp.sqrt(xp.maximum(rms(xp, update), np.float32(1.0)))
            stack.scatter(xp, scaled, update)
        return scaled, moments.changed()

    def _root(
        self, xp: Namespace, grads: Array, moments: Moments, i: int, cut: MatrixShape | None, weight: Array
    ) -> Array:
        """Returns the root of the moment: of a tall matrix that of each row, as published."""
        squares, b2 = grads * grads, self.betas[1]
        if cut is None:
            return xp.sqrt(moments.moved("whole", i, squares, b2, weight))
        squares = squares.reshape(len(grads), cut.rows, cut.cols, cut.inner)
        row = moments.moved("row", i, squares.mean(2), b2, weight)
        col = moments.moved("col", i, squares.mean(1), b2, weight)
        if cut.rows > cut.cols:
            root = xp.broadcast_to(xp.sqrt(row)[:, :, None], squares.shape)
        else:
            share = row / (row.mean(1, keepdims=True) + np.float32(1e-30))
            root = xp.sqrt(share[:, :, None] * col[:, None])
        return root.reshape(grads.shape)

    def evaluated(self, values: Array, state: State) -> Array:
        """Returns the average x, of which y = (1 - b1) z + b1 x."""
        share = np.float32(1.0 - 1.0 / self.betas[0])
        return values + share * (state["z"] - values)

    def kernel(self, arena: FlatParameters) -> Kernel:
        b2 = self.betas[1]
        constants = {
            "BETA2": b2,
            "BETA3": math.sqrt(b2),
            "WEIGHT_DECAY": self.weight_decay,
            "STABLE": self.use_stableadamw,
            "EVERY": _EVERY,
        }
        text = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
        states = moments_of("exp_avg_sq") | {"z": float32, "p0": float32, "s": float32}
        return matrix_kernel(
            arena,
            text,
            cut=self._cut,
            extra=arena.matrices(self._cut).slices(_EVERY),
            states=states,
            constants=constants,
            sums=("inner", "size"),
        )


def _sliced(arena: FlatParameters) -> Array:
    """Returns the places in the flat buffers of every 11th value of each parameter: (1, n) int64, stack by stack."""
    places = [np.arange(start, start + size, _EVERY) for start, size in arena.matrices(whole).spans()]
    return arena.backend.to_device(np.concatenate(places)[None].astype(np.int64))


class ProdigyScheduleFree(OptimizerKind):
    """`optimizer.lr` is a factor on the rate that it finds: 1. What is saved and sampled is the average."""

    name = "prodigy_schedule_free"
    finds_rate = True
    averages = True
    aka = ("prodigyplusschedulefree", "prodigy_plus_schedule_free", "prodigy_adv")

    betas: tuple[float, float] = field((0.9, 0.99), "decay of the two moments")
    eps: float = field(1e-8, "added to the denominator", gt=0, le=1)
    weight_decay: float = field(0.0, "weight decay, decoupled from the gradient", ge=0, le=1)
    d0: float = field(1e-6, "first estimate of the learning rate", gt=0, le=1)
    d_coef: float = field(1.0, "factor of the estimate: 0.5 to 2 are usual", gt=0, le=100)
    d_limiter: bool = field(True, "the estimate grows by a fifth at most in a step")
    schedulefree_c: float = field(0.0, "length of the average, 6 to 200 (arXiv 2507.09846); 0: of all steps", ge=0)
    factored: bool = field(True, "the second moment of a matrix is a row and a column of means, as Adafactor's")
    use_stableadamw: bool = field(True, "large updates of a matrix are scaled down by the root of their size")

    def problems(self, config: Any) -> Mapping[str, str]:
        return averaging_problem(self.betas)

    def rule(self) -> ProdigyScheduleFreeRule:
        return ProdigyScheduleFreeRule(
            self.betas,
            self.eps,
            self.weight_decay,
            self.d0,
            self.d_coef,
            self.d_limiter,
            self.schedulefree_c,
            self.factored,
            self.use_stableadamw,
        )
