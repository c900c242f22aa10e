"""AdamW with moments of 8 bits (arXiv 2110.02861), as bitsandbytes' `AdamW8bit` for every matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.optimizers import decayed

from .adamw import AdamW

_BLOCK = 256
_ZERO = {"signed": 127, "unsigned": 0}
"""The place of 0 among the levels."""


@dataclass(frozen=True, slots=True)
class AdamW8bitRule:
    """Each block of 256 values of a parameter has its largest magnitude in fp32, and 256 levels in terms of it.

    bitsandbytes keeps parameters of less than 4096 values in fp32; here all are in 8 bits. A stored number is the
    level's place counted from that of 0, so that zeros are zeros.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    name: str = "adamw8bit"
    elementwise: ClassVar[bool] = False

    def init(self, arena: FlatParameters) -> State:
        xp, put = arena.backend.xp, arena.backend.to_device
        state = {"signed": put(dynamic_levels(signed=True)[None]), "unsigned": put(dynamic_levels(signed=False)[None])}
        for i, stack in enumerate(arena.stacks):
            n, blocks = stack.places.shape[0], -(-int(np.prod(stack.shape)) // _BLOCK)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"{moment}.{i}"] = xp.zeros((n, blocks, _BLOCK), np.uint8)
                state[f"{moment}_max.{i}"] = xp.zeros((n, blocks, 1), float32)
        return state

    def numbers(self, state: State, step: Step) -> State:
        return {}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, (b1, b2) = step.xp, self.betas
        t = step.count.astype(np.float64) + 1.0
        first, second = (1.0 - b1**t).astype(float32), xp.sqrt(1.0 - b2**t).astype(float32)
        direction, changed = xp.zeros_like(g), State()
        for i, stack in enumerate(step.arena.stacks):
            own = stack.take(xp, g)
            blocks = _in_blocks(xp, own)
            m = b1 * _read(state, "signed", f"exp_avg.{i}", f"exp_avg_max.{i}") + (1.0 - b1) * blocks
            v = b2 * _read(state, "unsigned", f"exp_avg_sq.{i}", f"exp_avg_sq_max.{i}") + (1.0 - b2) * blocks * blocks
            moved = (m / first) / (xp.sqrt(v) / second + self.eps)
            stack.put(xp, direction, moved.reshape(len(own), -1)[:, : own[0].size])
            changed |= _written(xp, state, "signed", m, f"exp_avg.{i}", f"exp_avg_max.{i}")
            changed |= _written(xp, state, "unsigned", v, f"exp_avg_sq.{i}", f"exp_avg_sq_max.{i}")
        return decayed(direction, self.weight_decay, step.arena), changed


def dynamic_levels(signed: bool) -> np.ndarray[Any, Any]:
    """The 256 levels of the dynamic tree type, from -1 or 0 to 1, as bitsandbytes' `create_dynamic_map`.

    Seven decades, each with twice as many levels as the one below it.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, (1 << decade if signed else 2 << decade) + 1)
        means = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)
        levels += [*means, *(-means if signed else ())]
    return np.sort(np.array(levels, np.float32))


def _in_blocks(xp: Namespace, values: Array) -> Array:
    """(n, *shape) as (n, blocks, 256), the last block filled up with zeros."""
    flat = values.reshape(len(values), -1)
    blocks = -(-flat.shape[1] // _BLOCK)
    filled = xp.zeros((len(values), blocks * _BLOCK), float32)
    filled[:, : flat.shape[1]] = flat
    return filled.reshape(len(values), blocks, _BLOCK)


def _read(state: State, levels: str, codes: str, largest: str) -> Array:
    """The values of a moment, (n, blocks, 256) fp32."""
    table = state[levels][0]
    places = state[codes].astype(np.int64)
    return table[(places + _ZERO[levels]) % _BLOCK] * state[largest]


def _written(xp: Namespace, state: State, levels: str, values: Array, codes: str, largest: str) -> State:
    """Quantizes moments to the nearest level of each block.

    Args:
        xp: the array namespace.
        state: the optimizer's state, which holds the table of levels.
        levels: the name of that table.
        values: moments (n, blocks, 256), fp32.
        codes: the name under which the codes are stored.
        largest: the name under which the largest magnitude of each block is stored.

    Returns:
        The two changed entries of the state.
    """
    most = xp.abs(values).max(-1, keepdims=True)
    shares = values / xp.where(most > 0, most, np.float32(1.0))
    table = state[levels][0]
    places = xp.searchsorted((table[1:] + table[:-1]) * np.float32(0.5), shares)
    return {codes: ((places - _ZERO[levels]) % _BLOCK).astype(np.uint8), largest: most}


class AdamW8bit(AdamW):
    """AdamW's keys. Its state takes two bytes for each trained value instead of eight."""

    name = "adamw8bit"
    aka = ("adamw_8bit", "pagedadamw8bit", "pagedadamw", "adam8bit", "adamw8bitadv")

    def rule(self) -> Any:
        return AdamW8bitRule(self.betas, self.eps, self.weight_decay)
