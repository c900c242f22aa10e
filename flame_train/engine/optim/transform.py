"""The transforms of an optimizer's chain: each takes the flat gradient and returns what the next one gets.

A transform's state is named arrays: flat ones, with an entry for each trainable value, and 0-d ones. It returns the
entries that change but writes none of them: the optimizer does, if the step is taken at all. The gradient
itself is the arena's buffer, or made by an earlier transform, and may be edited in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from ..dtype import Array, float32
from ..namespace import Namespace
from ..random import GRADIENT_NOISE, bits, normal_of
from .flat_parameters import FlatParameters


def check(
    where: str, *, least: float = 0.0, above: float | None = None, below: float | None = math.inf, **numbers: Any
) -> None:
    """Raises ValueError, naming it, for a number that is NaN or out of bounds, TypeError for what is no number.

    A number must be at least `least`, or greater than `above` if that is given; and less than `below` unless that is
    None.
    """
    for name, value in numbers.items():
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"{where}: expected a number for {name}, got {value!r}")
        if not (least <= value if above is None else above < value) or not (below is None or value < below):
            lower = f"of at least {least:g}" if above is None else f"above {above:g}"
            upper = "" if below is None else " and below infinity" if below == math.inf else f" and below {below:g}"
            raise ValueError(f"{where}: expected {name} {lower}{upper}, got {value}")


State = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Step:
    """What a transform reads: the arena, and `count`, the number of updates done so far (0-d int64).

    `norm` is that of the gradient it is given, if known: for the first transform of a chain; else None. `numbers` are
    the rule's, where they were computed already, and `sums` those that it requested. `rate` is the learning rate (0-d
    fp32).
    """

    xp: Namespace
    arena: FlatParameters
    count: Array
    norm: Array | None = None
    numbers: State | None = None
    rate: Array | None = None
    sums: State | None = None

    @property
    def rates(self) -> Array:
        """The learning rate, of each value where the arena's `lr_scale` says so."""
        assert self.rate is not None
        return self.rate if self.arena.lr_scale is None else self.rate * self.arena.lr_scale

    def numbers_of(self, rule: Rule, state: State) -> State:
        """Returns the rule's single numbers in this step."""
        return rule.numbers(state, self) if self.numbers is None else self.numbers


class Transform(Protocol):
    """A transform of the chain. `name` prefixes its state's entries when they are saved."""

    @property
    def name(self) -> str:
        """Unique within a chain."""

    def init(self, arena: FlatParameters) -> State:
        """Returns the state before the first step."""

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        """Returns what `g` becomes, and the changed entries of the state."""


class Rule(Transform, Protocol):
    """The last transform of a chain: from the gradient to the update, which the learning rate multiplies.

    With `elementwise`, `update` is written over single elements. Each entry of the result depends on the same entry of
    the gradient and the values. It also depends on the flat fp32 arrays of the state, and on the rule's `numbers`. A
    GPU then runs it, and all links before it, as one pass (`fused`), traced from the very same Python. What depends on
    more than an element goes as one pass if the rule has a kernel (`KernelRule`).

    Any rule may have three things more. `moves = True` says that `update` returns the very change of the
    values, with the learning rate in it. `shown` are the names of single numbers of the state that belong in
    the log. For `evaluated` see `EvaluatedRule`, and for sums over all values `SummingRule`.
    """

    def numbers(self, state: State, step: Step) -> State:
        """Returns the rule's single numbers in this step, 0-d, from the state's and the step's `count` and `rate`.

        Those named as 0-d entries of the state are their new values; all others are fp32.
        """


@runtime_checkable
class SummingRule(Protocol):
    """A rule that looks at sums over all trained values, such as Prodigy's estimate of the distance."""

    def conclude(self, state: State, step: Step) -> State:
        """More single numbers, as `numbers`, from the step's `sums`, `numbers` and `rate`; not from its `count`."""


@runtime_checkable
class TermsRule(SummingRule, Protocol):
    """An elementwise rule that is summed over before its update: a pass of its own on a GPU."""

    def terms(self, g: Array, state: State, step: Step) -> tuple[State, State]:
        """Returns what is summed, by name and element, and the changed flat entries of the state."""


@runtime_checkable
class EvaluatedRule(Protocol):
    """A rule that trains one set of values and is judged by another, such as a schedule-free one."""

    def evaluated(self, values: Array, state: State) -> Array:
        """Returns the values to sample with and to save, for the trained ones; a new array."""


def settled(rule: TermsRule, g: Array, state: State, step: Step) -> tuple[Step, State]:
    """Returns the step with all numbers of a rule that has `terms`, and the entries of the state that these change.

    On a GPU both were done by an earlier pass, and nothing is left to do.
    """
    if step.numbers is not None:
        return step, {}
    step = replace(step, numbers=rule.numbers(state, step))  # type: ignore[attr-defined]  # it is a rule
    terms, changed = rule.terms(g, state, step)
    step = replace(step, sums={name: step.xp.sum(term, dtype=np.float64) for name, term in terms.items()})
    return replace(step, numbers=(step.numbers or {}) | rule.conclude(state, step)), changed


def singles(state: State, numbers: State) -> State:
    """Returns the new values of the 0-d entries of a rule's state among its numbers."""
    return {name: value for name, value in numbers.items() if name in state}


def shown_by(rule: Transform) -> tuple[str, ...]:
    """Returns the names of the single numbers of a rule's state that belong in the log."""
    shown: tuple[str, ...] = getattr(rule, "shown", ())
    return shown


def global_norm(xp: Namespace, g: Array) -> Array:
    """Returns the 2-norm of a flat array, 0-d in its dtype, summed in fp64. Not finite if any entry is not."""
    return xp.sqrt(xp.sum(xp.square(g), dtype=np.float64)).astype(g.dtype)


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scales the gradient down to a total norm of at most `max_norm`, as torch.nn.utils.clip_grad_norm_.

    With `normalize` a shorter gradient is scaled up to that norm as well, so that only its direction counts.
    """

    max_norm: float
    normalize: bool = False
    name: str = "clip_norm"

    def __post_init__(self) -> None:
        check("clip_norm", below=None, max_norm=self.max_norm)

    def init(self, arena: FlatParameters) -> State:
        return {"max_norm": arena.backend.xp.full((), self.max_norm, float32)}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        norm = global_norm(step.xp, g) if step.norm is None else step.norm
        g *= self.numbers(state, replace(step, norm=norm))["clip"]
        return g, {}

    def numbers(self, state: State, step: Step) -> State:
        """Returns the factor for a gradient of the step's norm, as `clip`: 0-d fp32."""
        assert step.norm is not None
        factor = state["max_norm"] / (step.norm + np.float32(1e-6))
        return {"clip": factor if self.normalize else step.xp.minimum(factor, np.float32(1.0))}


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Limits every entry to [-limit, limit], as torch.nn.utils.clip_grad_value_."""

    limit: float
    name: str = "clip_value"

    def __post_init__(self) -> None:
        check("clip_value", below=None, limit=self.limit)

    def init(self, arena: FlatParameters) -> State:
        return {"limit": arena.backend.xp.full((), self.limit, float32)}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        limit = self.numbers(state, step)["limit"]
        g[...] = step.xp.clip(g, -limit, limit)
        return g, {}

    def numbers(self, state: State, step: Step) -> State:
        """Returns the largest magnitude, as `limit`: 0-d fp32."""
        return {"limit": state["limit"]}


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Adds N(0, std^2 / (1 + count)^decay) to every entry (arXiv 1511.06807, with eta = std^2).

    The noise is a function of (seed, count, position), so a resumed run draws what it would have drawn.
    """

    std: float
    seed: int
    decay: float = 0.55
    name: str = "gradient_noise"

    CHUNK: ClassVar[int] = 1 << 20
    """Numbers drawn at a time, since drawing takes about ten fp64 arrays of this size. They depend on their chunk."""

    def __post_init__(self) -> None:
        check("gradient_noise", std=self.std, decay=self.decay)

    def init(self, arena: FlatParameters) -> State:
        return {"std": arena.backend.xp.full((), self.std, float32)}

    def update(self, g: Array, state: State, step: Step) -> tuple[Array, State]:
        xp = step.xp
        std = self.numbers(state, step)["std"]
        for chunk, start in enumerate(range(0, g.size, self.CHUNK)):
            part = g[start : start + self.CHUNK]
            place = xp.full((1,), chunk, np.int64)
            words = bits(xp, self.seed, GRADIENT_NOISE, step.count, place, part.size)
            part += std * normal_of(xp, words[0])
        for start, stop in step.arena.padding:
            g[start:stop] = 0.0
        return g, {}

    def numbers(self, state: State, step: Step) -> State:
        """Returns the noise's standard deviation in this step, as `std`: 0-d fp32."""
        anneal = (1.0 + step.count.astype(np.float64)) ** (-0.5 * self.decay)
        return {"std": (state["std"] * anneal).astype(float32)}
