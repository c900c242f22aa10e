"""How a step passes over the arena: link by link, or all at once where a kernel knows the chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..dtype import Array, float32
from .arena import Arena
from .rules import AdamWRule
from .transform import ClipNorm, State, Step, Transform, global_norm

_BLOCKS, _THREADS = 1024, 256


class Update(Protocol):
    """The part of a step that touches every trainable value."""

    def norm(self, divisor: Array | None) -> Array:
        """The 2-norm of the gradients over `divisor` (0-d fp32, None for 1): 0-d fp32."""

    def apply(self, take: Array, norm: Array, lr: Array, count: Array) -> None:
        """Updates values, working copies and the links' states where `take` (0-d bool) is true."""


class ByLinks:
    """Each link in turn. Any chain; the one the others are checked against."""

    def __init__(self, arena: Arena, transforms: Sequence[Transform], states: Sequence[State]) -> None:
        self._arena, self._transforms, self._states = arena, transforms, states

    def norm(self, divisor: Array | None) -> Array:
        if divisor is not None:
            self._arena.grads[...] /= divisor
        return global_norm(self._arena.backend.xp, self._arena.grads)

    def apply(self, take: Array, norm: Array, lr: Array, count: Array) -> None:
        arena, xp = self._arena, self._arena.backend.xp
        g, step = arena.grads, Step(xp, arena, count, norm)
        changes: list[tuple[State, State]] = []
        for link, state in zip(self._transforms, self._states, strict=True):
            g, changed = link.update(g, state, step)
            changes.append((state, changed))
            step = replace(step, norm=None)
        rate = lr.astype(float32) if arena.lr_scale is None else lr.astype(float32) * arena.lr_scale
        select(xp, take, arena.values, arena.values - rate * g)
        arena.refresh()
        for state, changed in changes:
            for name, new in changed.items():
                select(xp, take, state[name], new)


class AdamWAtOnce:
    """Clipping by norm and AdamW in one kernel on a GPU, to the same bits; the gradients stay as they are."""

    def __init__(self, arena: Arena, transforms: Sequence[Transform], states: Sequence[State]) -> None:
        self._arena, self._states = arena, states
        rule = transforms[-1]
        assert isinstance(rule, AdamWRule)
        self._rule = rule
        xp = arena.backend.xp
        self._parts: Array = xp.empty(_BLOCKS, np.float64)
        self._one: Array = xp.ones((), float32)
        self._divisor = self._one

    @staticmethod
    def fits(arena: Arena, transforms: Sequence[Transform]) -> bool:
        """True for AdamW on a GPU, alone or after clipping by norm."""
        return arena.backend.kernels is not None and [type(t) for t in transforms] in (
            [AdamWRule],
            [ClipNorm, AdamWRule],
        )

    def norm(self, divisor: Array | None) -> Array:
        arena, k = self._arena, self._arena.backend.kernels
        self._divisor = self._one if divisor is None else divisor
        k.launch("adamw.cu", "squares", float32, (_BLOCKS,), _THREADS,
                 (arena.grads, self._divisor, self._parts, np.int64(arena.size)))  # fmt: skip
        return k.xp.sqrt(k.xp.sum(self._parts)).astype(float32)

    def apply(self, take: Array, norm: Array, lr: Array, count: Array) -> None:
        arena, k, rule = self._arena, self._arena.backend.kernels, self._rule
        clip = self._one
        if len(self._states) == 2:
            clip = ClipNorm.factor(k.xp, self._states[0], norm)
        first, second = rule.corrections(k.xp, count)
        moments, none = self._states[-1], np.intp(0)
        factors = [none if a is None else a for a in (arena.low, arena.lr_scale, arena.decay_scale)]
        b1, b2 = rule.betas
        constants = [np.float32(x) for x in (b1, 1.0 - b1, b2, 1.0 - b2, rule.eps, rule.weight_decay)]
        k.launch(
            "adamw.cu", "adamw", float32 if arena.low is None else arena.low.dtype, (-(-arena.size // _THREADS),),
            _THREADS,
            (arena.grads, arena.values, moments["exp_avg"], moments["exp_avg_sq"], *factors, self._divisor, clip,
             lr.astype(float32), first, second, take, *constants, np.int64(arena.size)),
        )  # fmt: skip
        arena.changed()


def make_update(arena: Arena, transforms: Sequence[Transform], states: Sequence[State]) -> Update:
    """The fastest way there is for this chain."""
    way = AdamWAtOnce if AdamWAtOnce.fits(arena, transforms) else ByLinks
    return way(arena, transforms, states)


def select(xp: Any, take: Array, buffer: Array, new: Array) -> None:
    """buffer = new where the step is taken. A select and no product: inf * 0 is NaN."""
    buffer[...] = xp.where(take, new, buffer)
