"""Factored second moments for Adafactor and CAME: a row and a column of means for each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import FlatParameters, State
from flame_train.engine.optim.fused import Kernel
from flame_train.engine.optim.matrices import AsMatrices, Matrices, last_two

THREADS = 512
"""Of the block that has a matrix."""


def matrix_kernel(
    arena: FlatParameters,
    text: str,
    *,
    cut: AsMatrices = last_two,
    pairs: int = 1,
    extra: Mapping[int, int] | None = None,
    **more: Any,
) -> Kernel:
    """Returns a kernel with a block a matrix: its tables are the matrices, and `pairs` of places for factors.

    `extra` is a number for each parameter by its own, which the kernel finds in its `Matrix`.

    Args:
        text: the kernel in CUDA C.
        cut: which dims of a parameter are the matrix's.
        pairs: how many pairs of places for factors.
        extra: a number by parameter, or None.
        more: further fields of `Kernel`.
    """
    matrices, xp = arena.matrices(cut), arena.backend.xp
    factors = {
        f"by_{kind}{i}": xp.empty((1, max(matrices.totals[kind], 1)), float32)
        for i in range(pairs)
        for kind in ("row", "col")
    }
    arguments = {"matrices": matrices.table(extra)} | factors
    return Kernel(text, matrices.count, THREADS, arguments, **more)


def moments_of(*names: str) -> dict[str, Any]:
    """Returns the dtypes of the moments of these names, of rows, of columns and whole, in a kernel's order."""
    return {f"{name}_{kind}": float32 for name in names for kind in ("row", "col", "whole")}


class Moments:
    """The factored moments `name` in a step: read, moved on stack by stack, and joined again."""

    def __init__(self, xp: Namespace, matrices: Matrices, state: State, name: str) -> None:
        self._xp, self._matrices, self._state, self._name = xp, matrices, state, name
        self._parts: dict[str, list[Array]] = {}

    def inverse_root(self, squares: Array, stack: int, decay: Any) -> Array:
        """Returns 1 / sqrt of the moment of `squares` (n, *shape), which moves by 1 - `decay`."""
        xp = self._xp
        if not self._matrices.is_cut(stack):
            return 1.0 / xp.sqrt(self.moved("whole", stack, squares, decay))
        row = self.moved("row", stack, squares.mean(-1), decay)
        col = self.moved("col", stack, squares.mean(-2), decay)
        by_row = 1.0 / xp.sqrt(row / row.mean(-1, keepdims=True))
        by_col = 1.0 / xp.sqrt(col)
        root: Array = by_row[..., None] * by_col[..., None, :]
        return root

    def moved(self, kind: str, stack: int, mean: Array, decay: Any, weight: Any = None) -> Array:
        """Returns a moment, in the shape of `mean`: decay * moment + weight * mean.

        Args:
            kind: "row", "col" or "whole".
            stack: the number of the stack of matrices.
            mean: the new values.
            decay: the share of the moment that stays.
            weight: the share of `mean`; None: 1 - decay.
        """
        before = self._matrices.part(self._state[f"{self._name}_{kind}"], kind, stack).reshape(mean.shape)
        after: Array = decay * before + (1.0 - decay if weight is None else weight) * mean
        self._parts.setdefault(kind, []).append(after)
        return after

    def changed(self) -> State:
        """Returns the entries of the state."""
        joined = Matrices.joined
        return {f"{self._name}_{kind}": joined(self._xp, parts) for kind, parts in self._parts.items()}


def rms(xp: Namespace, x: Array) -> Array:
    """Returns the root of the mean square of each parameter of a stack, shaped to go with it; fp32."""
    axes = tuple(range(1, x.ndim))
    return xp.sqrt((x * x).mean(axes, dtype=np.float64, keepdims=True)).astype(float32)


def clipped(xp: Namespace, update: Array, threshold: float) -> Array:
    """Returns each parameter's update, scaled down to a root mean square of at most `threshold`."""
    return update / xp.maximum(rms(xp, update) / np.float32(threshold), np.float32(1.0))
