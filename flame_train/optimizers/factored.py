"""Factored second moments for Adafactor and CAME: a row and a column of means for each matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import FlatParameters, State


def zeros(arena: FlatParameters, name: str) -> State:
    """The factored moments of every stack of parameters: `row.i` and `col.i`, or `whole.i` below two dims."""
    state: State = {}
    for i, stack in enumerate(arena.stacks):
        n, shape, xp = stack.places.shape[0], stack.shape, arena.backend.xp
        if len(shape) < 2:
            state[f"{name}_whole.{i}"] = xp.zeros((n, *shape), float32)
        else:
            state[f"{name}_row.{i}"] = xp.zeros((n, *shape[:-1]), float32)
            state[f"{name}_col.{i}"] = xp.zeros((n, *shape[:-2], shape[-1]), float32)
    return state


def inverse_root(xp: Namespace, squares: Array, state: State, name: str, i: int, decay: Any) -> tuple[Array, State]:
    """1 / sqrt of the second moment, factored into rows and columns for matrices (Adafactor, arXiv 1804.04235).

    Args:
        xp: the array namespace.
        squares: squared gradients (n, *shape).
        state: the state that holds the moments.
        name: their prefix in the state.
        i: the number of the stack of parameters.
        decay: the decay of the moments; the new value has the weight 1 - decay.

    Returns:
        The inverse root, which broadcasts to `squares`, and the changed entries of the state.
    """
    fresh = 1.0 - decay
    if squares.ndim < 3:
        whole = decay * state[f"{name}_whole.{i}"] + fresh * squares
        return 1.0 / xp.sqrt(whole), {f"{name}_whole.{i}": whole}
    row = decay * state[f"{name}_row.{i}"] + fresh * squares.mean(-1)
    col = decay * state[f"{name}_col.{i}"] + fresh * squares.mean(-2)
    by_row = 1.0 / xp.sqrt(row / row.mean(-1, keepdims=True))
    by_col = 1.0 / xp.sqrt(col)
    return by_row[..., None] * by_col[..., None, :], {f"{name}_row.{i}": row, f"{name}_col.{i}": col}


def rms(xp: Namespace, x: Array) -> Array:
    """The root of the mean square of each parameter of a stack, shaped to go with it; fp32."""
    axes = tuple(range(1, x.ndim))
    return xp.sqrt((x * x).mean(axes, dtype=np.float64, keepdims=True)).astype(float32)


def clipped(xp: Namespace, update: Array, threshold: float) -> Array:
    """Each parameter's update, scaled down to a root mean square of at most `threshold`."""
    return update / xp.maximum(rms(xp, update) / np.float32(threshold), np.float32(1.0))
