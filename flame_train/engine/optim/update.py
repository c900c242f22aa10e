"""How a step updates the arena: transform by transform, or all in one pass by kernels that know these transforms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from ..dtype import Array, float32
from ..namespace import Namespace
from ..random import GRADIENT_NOISE, signed, tables
from .flat_parameters import FlatParameters
from .fused import KernelPass, fuses, passes_of
from .step_control import METRICS, StepControl
from .transform import (
    ClipNorm,
    ClipValue,
    GradientNoise,
    Rule,
    State,
    Step,
    SummingRule,
    Transform,
    global_norm,
    shown_by,
    singles,
)

_BLOCKS, _THREADS = 1024, 256

_SCALAR_DEFAULTS = {
    "apply": 0.0,
    "divisor": 1.0,
    "limit": math.inf,
    "clip": 1.0,
    "std": 0.0,
    "rate": 0.0,
    "average": 0.0,
}
"""The numbers that the kernels read, in order, with the value of each if no transform sets it; the rule's follow."""


@dataclass(frozen=True, slots=True)
class UpdateBuffers:
    """What a step works on: the transforms with their `states`, and buffers that stay at their addresses.

    `mean` is the moving average's state, `scalars` the control's, `metrics` the optimizer's.
    """

    arena: FlatParameters
    transforms: tuple[Transform, ...]
    states: list[State]
    control: StepControl
    mean: State
    scalars: State
    metrics: Array

    def places(self) -> State:
        """Returns the 0-d buffers to which the control's results are written, by its names for them."""
        figures = {f"metrics.{n}": self.metrics[i : i + 1].reshape(()) for i, n in enumerate(METRICS)}
        return figures | self.scalars


class Update(Protocol):
    """A way to do a step."""

    def step(self, loss: Array | None) -> None:
        """Updates values, compute copies, states, moving average, numbers and metrics from the gathered gradients."""


class ReferenceUpdate:
    """Applies each transform in turn. It takes any chain, and is the reference for `FusedUpdate`."""

    def __init__(self, buffers: UpdateBuffers) -> None:
        self._buffers, self._places = buffers, buffers.places()

    def step(self, loss: Array | None) -> None:
        w, xp = self._buffers, self._buffers.arena.backend.xp
        if w.control.divides:
            w.arena.grads[...] /= w.control.divisor(w.scalars)
        norm = global_norm(xp, w.arena.grads)
        numbers, after = w.control.of(xp, w.scalars, norm, loss)
        self._apply(numbers["apply"], numbers["rate"], norm)
        if w.control.average is not None:
            w.control.average.update(w.arena, w.mean, numbers["average"])
        for name, value in after.items():
            self._places[name][...] = value

    def _apply(self, apply: Array, rate: Array, norm: Array) -> None:
        """Updates values, compute copies and the transforms' states if `apply` (0-d bool) is true."""
        w, arena, xp = self._buffers, self._buffers.arena, self._buffers.arena.backend.xp
        g, step = arena.grads, Step(xp, arena, w.scalars["count"], norm, rate=rate)
        changes: list[tuple[State, State]] = []
        for transform, state in zip(w.transforms, w.states, strict=True):
            g, changed = transform.update(g, state, step)
            changes.append((state, changed))
            step = replace(step, norm=None)
        change = g if getattr(w.transforms[-1], "moves", False) else step.rates * g
        _select(xp, apply, arena.values, arena.values - change)
        arena.sync_copies()
        for state, changed in changes:
            for name, new in changed.items():
                _select(xp, apply, state[name], new)
        for i, name in enumerate(shown_by(w.transforms[-1])):
            w.metrics[len(METRICS) + i] = w.states[-1][name]


class FusedUpdate:
    """A few kernels on a GPU for any chain that `fits`, with the same bits as `ReferenceUpdate` if it is elementwise.

    One sums squares, one runs the control, one updates the arena. A rule that looks at sums over all values has one
    more that concludes from them. It has one that sums, unless its own kernel does both. Gradients are not written.
    """

    def __init__(self, buffers: UpdateBuffers) -> None:
        self._buffers, arena, xp = buffers, buffers.arena, buffers.arena.backend.xp
        self._rule = cast(Rule, buffers.transforms[-1])  # `fits` has looked
        self._transforms: dict[type, tuple[Any, State]] = {
            type(t): (t, state) for t, state in zip(buffers.transforms, buffers.states, strict=True)
        }
        noise = [t for t in buffers.transforms if isinstance(t, GradientNoise)]
        self._names = {
            "T": float32 if arena.compute_values is None else arena.compute_values.dtype,
            "NOISE": len(noise),
            "STREAM": GRADIENT_NOISE,
            "CHUNK": GradientNoise.CHUNK,
        }
        self._seed = signed(noise[0].seed if noise else 0)
        state = buffers.states[-1]
        of_rule = self._numbers_once(xp, state)
        neutral = _SCALAR_DEFAULTS | {n: 1.0 for n in of_rule if n not in state}
        self._before = f"{tables()}enum {{ {', '.join(neutral).upper()} }};\n"
        names = [n for n in of_rule if n not in state]
        self._passes = passes_of(self._rule, arena, state, names, arena.backend.kernels.scalars.elements)
        self._sums: Array = xp.empty((2, _BLOCKS), np.float64)
        self._now: Array = arena.backend.to_device(np.array([*neutral.values()], float32))
        self._filled: Array = arena.backend.to_device(arena.valid_lengths)
        self._given: State = {"sums": self._sums[0], "limited sums": self._sums[1], **buffers.scalars}
        for transform, state in self._transforms.values():
            self._given |= {f"{transform.name}.{n}": a for n, a in state.items() if a.ndim == 0}
        self._into = {n: self._now[i : i + 1].reshape(()) for i, n in enumerate(neutral)} | buffers.places()
        shown = enumerate(shown_by(self._rule), len(METRICS))
        self._into |= {f"metrics.{n}": buffers.metrics[i : i + 1].reshape(()) for i, n in shown}
        self._into |= {f"state.{n}": a for n, a in state.items() if not a.ndim}
        self._names_now = {"apply", "rate", *names}
        self._programs: dict[Any, Any] = {}

    @staticmethod
    def fits(buffers: UpdateBuffers) -> bool:
        """Returns True on a GPU for an elementwise rule, or one with a kernel, behind links that the kernels know.

        These are any of clipping by value, by norm and noise, in this order.
        """
        *links, _ = (type(t) for t in buffers.transforms)
        known = [kind for kind in (ClipValue, ClipNorm, GradientNoise) if kind in links]
        rule, state = buffers.transforms[-1], buffers.states[-1]
        return buffers.arena.backend.kernels is not None and fuses(rule, state) and links == known

    def step(self, loss: Array | None) -> None:
        w, k = self._buffers, self._buffers.arena.backend.kernels
        loss = None if loss is None else k.contiguous(loss)
        limit = self._transforms[ClipValue][1]["limit"] if ClipValue in self._transforms else np.intp(0)
        self._launch(
            "squares",
            (_BLOCKS,),
            (
                w.arena.grads,
                w.scalars["scale"],
                np.float32(w.control.accumulation),
                limit,
                *self._sums,
                np.int64(w.arena.size),
            ),
        )
        given = self._given if loss is None else self._given | {"loss": loss}
        kind = None if loss is None else (loss.dtype, loss.ndim > 0)
        if kind not in self._programs:
            self._programs[kind] = k.scalars.program(self._scalars, given, self._into)
        self._programs[kind](given, self._into)
        for each in self._passes:
            self._run(each)
            if each.sums:
                self._conclude(each)

    def _numbers_once(self, xp: Namespace, state: State) -> State:
        """Returns the rule's numbers as they are in the first step, for their names."""
        zero = xp.zeros((), float32)
        step = Step(xp, self._buffers.arena, self._buffers.scalars["count"], rate=zero)
        numbers = self._rule.numbers(state, step)
        if isinstance(self._rule, SummingRule):
            step = replace(step, numbers=numbers, sums=_Zeros(xp))
            numbers = numbers | self._rule.conclude(state, step)
        return numbers

    def _changes(self, xp: Namespace, given: State, numbers: State, apply: Array) -> State:
        """Numbers of the rule as they are written: those of its state if the step is taken, some of them to the log."""
        state = {n: given[f"{self._rule.name}.{n}"] for n, a in self._buffers.states[-1].items() if not a.ndim}
        new = {n: xp.where(apply, v, state[n]) for n, v in singles(state, numbers).items()}
        found = {n: v for n, v in numbers.items() if n not in state} | {f"state.{n}": v for n, v in new.items()}
        return found | {f"metrics.{n}": new[n] for n in shown_by(self._rule) if n in new}

    def _conclude(self, done: KernelPass) -> None:
        """Launches the kernel of the rule's numbers that follow from a pass's sums."""
        prefix = f"{self._rule.name}."
        given: State = {n: a for n, a in self._given.items() if n.startswith(prefix)}
        given |= {f"now.{n}": a for n, a in self._into.items() if n in self._names_now}
        given |= {f"sum.{n}": a for n, a in done.sums.items()}
        key = ("conclude", done.name)
        if key not in self._programs:
            self._programs[key] = self._buffers.arena.backend.kernels.scalars.program(self._after, given, self._into)
        self._programs[key](given, self._into)

    def _after(self, xp: Namespace, given: State) -> State:
        """Returns what the rule concludes: the formula that is traced into a kernel."""
        assert isinstance(self._rule, SummingRule)
        prefix = f"{self._rule.name}."
        state = {n.removeprefix(prefix): a for n, a in given.items() if n.startswith(prefix)}
        now = {n.removeprefix("now."): a for n, a in given.items() if n.startswith("now.")}
        sums = {n.removeprefix("sum."): xp.sum(a) for n, a in given.items() if n.startswith("sum.")}
        step = Step(xp, self._buffers.arena, self._buffers.scalars["count"], numbers=now, rate=now["rate"], sums=sums)
        return self._changes(xp, given, self._rule.conclude(state, step), now["apply"] > 0)

    def _scalars(self, xp: Namespace, given: State) -> State:
        """Returns the control, and the numbers of all transforms: the formula that is traced into a kernel."""
        norm = _norm_of(xp, given["sums"])
        numbers, after = self._buffers.control.of(xp, given, norm, given.get("loss"))
        step = Step(xp, self._buffers.arena, given["count"], norm)
        if ClipValue in self._transforms and ClipNorm in self._transforms:
            step = replace(step, norm=_norm_of(xp, given["limited sums"]))
        step = replace(step, rate=numbers["rate"])
        for transform, _ in self._transforms.values():
            prefix = f"{transform.name}."
            state = {n.removeprefix(prefix): a for n, a in given.items() if n.startswith(prefix)}
            found = transform.numbers(state, step)
            numbers |= self._changes(xp, given, found, numbers["apply"]) if transform is self._rule else found
        return numbers | after

    def _run(self, each: KernelPass) -> None:
        """Launches a pass of the rule."""
        w, arena = self._buffers, self._buffers.arena
        none = np.intp(0)
        optional = (w.mean.get("values"), arena.compute_values, arena.lr_scale, arena.decay_scale)
        args = (
            arena.grads,
            arena.values,
            *(none if a is None else a for a in optional),
            self._filled,
            self._now,
            w.scalars["count"],
            self._seed,
            np.int64(arena.size),
            *each.args,
        )
        self._launch(each.name, (each.blocks,), args, each.text, each.threads)

    def _launch(
        self, kernel: str, grid: tuple[int, ...], args: tuple[Any, ...], after: str = "", threads: int = _THREADS
    ) -> None:
        kernels = self._buffers.arena.backend.kernels
        kernels.launch_header("optim/update.cuh", kernel, self._names, grid, threads, args, self._before, after)


def make_update(buffers: UpdateBuffers) -> Update:
    """Returns `FusedUpdate` if it fits, else `ReferenceUpdate`."""
    return FusedUpdate(buffers) if FusedUpdate.fits(buffers) else ReferenceUpdate(buffers)


class _Zeros(dict[str, Array]):
    """Sums of any name, all of them 0."""

    def __init__(self, xp: Namespace) -> None:
        self._zero = xp.zeros((), np.float64)

    def __missing__(self, name: str) -> Array:
        return self._zero


def _norm_of(xp: Namespace, sums: Array) -> Array:
    """Returns `global_norm` of a gradient whose squares were summed in parts, fp64."""
    return xp.sqrt(xp.sum(sums)).astype(float32)


def _select(xp: Namespace, apply: Array, buffer: Array, new: Array) -> None:
    """Selects new if the step is taken. A product would not do, because inf * 0 is NaN."""
    buffer[...] = xp.where(apply, new, buffer)
