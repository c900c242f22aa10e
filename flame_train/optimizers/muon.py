"""Muon: momentum made orthogonal by Newton-Schulz steps (arXiv 2502.16982), as torch.optim.Muon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from flame_train.engine import Tensor, no_grad
from flame_train.engine.dtype import Array, float32
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.optimizers import decayed
from flame_train.optimizers import OptimizerKind
from flame_train.settings import field

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


@dataclass(frozen=True, slots=True)
class MuonRule:
    """Each matrix's momentum with all singular values near 1, times a factor for the matrix's shape.

    A convolution's kernel is a matrix of one row for each output; a vector is a matrix of one row, and so normalised.
    """

    momentum: float
    nesterov: bool
    weight_decay: float
    adjust: str
    name: str = "muon"
    elementwise: ClassVar[bool] = False

    def init(self, arena: FlatParameters) -> State:
        _ = arena.stacks  # made now: a captured step cannot
        return {"momentum": arena.backend.xp.zeros(arena.size, float32)}

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp = step.xp
        buffer = self.momentum * state["momentum"] + (1.0 - self.momentum) * g
        looked = self.momentum * buffer + (1.0 - self.momentum) * g if self.nesterov else buffer
        direction = xp.zeros_like(g)
        for stack in step.arena.stacks:
            grads = stack.gather(xp, looked)
            rows = stack.shape[0] if len(stack.shape) > 1 else 1
            matrices = grads.reshape(grads.shape[0], rows, -1)
            factor = np.float32(self._factor(*matrices.shape[1:]))
            stack.scatter(xp, direction, factor * orthogonal(matrices))
        return decayed(direction, self.weight_decay, step.arena), {"momentum": buffer}

    def _factor(self, rows: int, columns: int) -> float:
        """Returns the factor: "original" is the first publication's, "match_rms_adamw" gives updates AdamW's size."""
        if self.adjust == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def orthogonal(x: Array) -> Array:
    """Matrices (n, rows, columns) with their singular values brought near 1, fp32."""
    wide = x if x.shape[1] <= x.shape[2] else x.transpose(0, 2, 1)
    squares = (wide * wide).sum((1, 2), dtype=np.float64, keepdims=True)
    norms = squares**0.5
    a, b, c = _COEFFICIENTS
    with no_grad():
        y = Tensor((wide / norms.clip(1e-7).astype(float32)).astype(float32))
        for _ in range(_STEPS):
            gram = y @ y.transpose(1, 2)
            y = y * a + (gram * b + (gram @ gram) * c) @ y
    found: Array = y.data
    return found if x.shape[1] <= x.shape[2] else found.transpose(0, 2, 1)


class Muon(OptimizerKind):
    name = "muon"
    aka = ("adamuon", "muonwithauxadam", "singledevicemuon")

    momentum: float = field(0.95, "momentum", ge=0, lt=1)
    nesterov: bool = field(True, "Nesterov's momentum, which looks a step ahead")
    weight_decay: float = field(0.1, "weight decay, decoupled from the gradient", ge=0, le=1)
    muon_scale: Literal["match_rms_adamw", "original"] = field(
        "match_rms_adamw", "size of updates: that of AdamW's, for AdamW's learning rates, or the first publication's"
    )

    def rule(self) -> MuonRule:
        return MuonRule(self.momentum, self.nesterov, self.weight_decay, self.muon_scale)
