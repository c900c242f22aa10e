"""What `grad` runs: only what leads from its outputs to its inputs, and of a node only the formulas that are wanted."""

from __future__ import annotations

import numpy as np

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dtype import Array
from flame_train.engine.mode import op_hooks


class Ran:
    """The ops that ran backward, and how many gradients each made."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, int]] = []

    def before(self, op: str, phase: str, arrays: list[Array]) -> None:
        pass

    def after(self, op: str, phase: str, arrays: list[Array]) -> None:
        if phase == "backward":
            self.ops.append((op, len(arrays)))


def leaf(*shape: int) -> flame.Tensor:
    return flame.tensor(np.random.default_rng(0).standard_normal(shape), requires_grad=True)


def ran(loss: flame.Tensor, *inputs: flame.Tensor) -> list[tuple[str, int]]:
    seen = Ran()
    with op_hooks(seen):
        flame.grad(loss, inputs, retain_graph=True)
    return seen.ops


def test_the_gradient_of_the_last_product_runs_only_that() -> None:
    weights = [leaf(3, 3) for _ in range(30)]
    h = leaf(2, 3)
    for w in weights:
        h = F.matmul(h, w)
    loss = h.sum()
    assert ran(loss, weights[-1]) == [("sum", 1), ("matmul", 1)]
    assert ran(loss, h) == [("sum", 1)]
    assert len(ran(loss, weights[0])) == 31


def test_of_a_block_that_is_run_again_only_what_is_younger_than_the_inputs() -> None:
    w, x = leaf(3, 3), leaf(2, 3)
    first = flame.checkpoint(lambda v: v @ w, x)
    second = flame.checkpoint(lambda v: v.exp(), first)
    assert [op for op, _ in ran(second.sum(), first)] == ["sum", "exp", "checkpoint"]
    assert "matmul" in [op for op, _ in ran(second.sum(), w)]  # the block's edges do not tell of `w`
