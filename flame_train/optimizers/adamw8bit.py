"""AdamW with moments of 8 bits (arXiv 2110.02861), as bitsandbytes' `AdamW8bit` for every matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flame_train.engine.dtype import Array, float32, uint8
from flame_train.engine.namespace import Namespace
from flame_train.engine.optim import FlatParameters, State, Step
from flame_train.engine.optim.fused import Kernel
from flame_train.engine.optim.optimizers import bias_corrections, decayed

from .adamw import AdamW

_BLOCK = 256
_WARPS = 8  # of a block of threads; each has a block of values
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
        _ = arena.stacks  # made now: a captured step cannot
        xp, put, blocks = arena.backend.xp, arena.backend.to_device, len(_blocks(arena))
        state = {"signed": put(dynamic_levels(signed=True)[None]), "unsigned": put(dynamic_levels(signed=False)[None])}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = xp.zeros((blocks, _BLOCK), uint8)
            state[f"{moment}_max"] = xp.zeros((blocks, 1), float32)
        return state

    def numbers(self, state: State, step: Step) -> State:
        return bias_corrections(self.betas, step)

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp, (b1, b2) = step.xp, self.betas
        numbers = step.numbers_of(self, state)
        grads = xp.concatenate([_in_blocks(xp, stack.gather(xp, g)) for stack in step.arena.stacks])
        m = b1 * _read(state, "signed", "exp_avg") + (1.0 - b1) * grads
        v = b2 * _read(state, "unsigned", "exp_avg_sq") + (1.0 - b2) * grads * grads
        moved = (m / numbers["first"]) / (xp.sqrt(v) / numbers["second"] + self.eps)
        direction, at = xp.zeros_like(g), 0
        for stack in step.arena.stacks:
            count, size = stack.places.shape[0], int(np.prod(stack.shape))
            blocks = count * -(-size // _BLOCK)
            stack.scatter(xp, direction, moved[at : at + blocks].reshape(count, -1)[:, :size])
            at += blocks
        changed = _written(xp, state, "signed", m, "exp_avg") | _written(xp, state, "unsigned", v, "exp_avg_sq")
        return decayed(direction, self.weight_decay, step.arena), changed

    def kernel(self, arena: FlatParameters) -> Kernel:
        (b1, b2), places = self.betas, _blocks(arena)
        constants = {
            "BETA1": b1,
            "BETA2": b2,
            "ONE_MINUS_BETA1": 1.0 - b1,
            "ONE_MINUS_BETA2": 1.0 - b2,
            "EPS": self.eps,
            "WEIGHT_DECAY": self.weight_decay,
            "BLOCKS": len(places),
        }
        states: dict[str, Any] = {
            "signed": float32,
            "unsigned": float32,
            "exp_avg": uint8,
            "exp_avg_max": float32,
            "exp_avg_sq": uint8,
            "exp_avg_sq_max": float32,
        }
        text = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
        tables = {"places": arena.backend.to_device(places)}
        return Kernel(text, -(-len(places) // _WARPS), _WARPS * 32, tables, states, constants)


def _blocks(arena: FlatParameters) -> np.ndarray[Any, Any]:
    """Returns where each block of values begins in the flat buffers, and its size: (blocks, 2) int64."""
    spans = arena.matrices().spans()
    blocks = [
        (at, min(_BLOCK, start + size - at)) for start, size in spans for at in range(start, start + size, _BLOCK)
    ]
    return np.array(blocks, np.int64)


def dynamic_levels(signed: bool) -> np.ndarray[Any, Any]:
    """Returns the 256 levels of the dynamic tree type, from -1 or 0 to 1, as bitsandbytes' `create_dynamic_map`.

    Seven decades, each with twice as many levels as the one below it.
    """
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, (1 << decade if signed else 2 << decade) + 1)
        means = (edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade - 6)
        levels += [*means, *(-means if signed else ())]
    return np.sort(np.array(levels, np.float32))


def _in_blocks(xp: Namespace, values: Array) -> Array:
    """Returns (n, *shape) as (n * blocks, 256), the last block of each filled up with zeros."""
    flat = values.reshape(len(values), -1)
    blocks = -(-flat.shape[1] // _BLOCK)
    filled = xp.zeros((len(values), blocks * _BLOCK), float32)
    filled[:, : flat.shape[1]] = flat
    return filled.reshape(-1, _BLOCK)


def _read(state: State, levels: str, moment: str) -> Array:
    table = state[levels][0]
    places = state[moment].astype(np.int64)
    return table[(places + _ZERO[levels]) % _BLOCK] * state[f"{moment}_max"]


def _written(xp: Namespace, state: State, levels: str, values: Array, moment: str) -> State:
    """Returns the nearest levels of values (blocks, 256), and the largest magnitude of each block."""
    most = xp.abs(values).max(-1, keepdims=True)
    shares = values / xp.where(most > 0, most, np.float32(1.0))
    table = state[levels][0]
    places = xp.searchsorted((table[1:] + table[:-1]) * np.float32(0.5), shares)
    return {moment: ((places - _ZERO[levels]) % _BLOCK).astype(np.uint8), f"{moment}_max": most}


class AdamW8bit(AdamW):
    """AdamW's keys. Its state takes two bytes for each trained value instead of eight."""

    name = "adamw8bit"
    aka = ("adamw_8bit", "pagedadamw8bit", "pagedadamw", "adam8bit", "adamw8bitadv")

    def rule(self) -> Any:
        return AdamW8bitRule(self.betas, self.eps, self.weight_decay)
