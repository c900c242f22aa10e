"""A memory budget: the fastest settings whose run fits under it, among those that the config leaves to the plan.

What each setting of the ladder (`levers.py`) saves and costs is measured on shapes, one setting at a time. Combinations
come in the order of their estimated step time. The first whose whole run does not run out of memory, rehearsed on
shapes with pools of the budget's size, is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, NamedTuple

from flame_train.config.render import toml_value
from flame_train.engine.shape_run import Gpu
from flame_train.errors import ConfigError

from ..plan import Plan
from .levers import LEVERS, Lever, Settings, Stage, allowed, given, value_of, with_settings
from .prediction import (
    Alone,
    PredictedMemory,
    encode_captions,
    encode_images,
    encoding_alone,
    grid_alone,
    predicted_memory,
    steps_alone,
)

GIB: Final = 2**30

OUTSIDE: Final = 640 << 20
"""Bytes of the GPU that a run takes beside its pools: the CUDA context and the code of kernels and libraries."""

SPARE: Final = 0.03
"""The share of the pools that the plan leaves unused: predictions err by so much, and other buckets take a little."""

_ALONE: Final[Mapping[Stage, Callable[[Plan, Gpu, int], Alone]]] = {
    Stage.CAPTIONS: partial(encoding_alone, encode_captions),
    Stage.IMAGES: partial(encoding_alone, encode_images),
    Stage.STEP: lambda plan, gpu, processes: steps_alone([plan], gpu, processes)[0],
    Stage.GRID: grid_alone,
}

_ENDLESS: Final = 1 << 60
"""Bytes that no card has: a limit that is never met, under which a run draws its grids as it does under one."""

_TELLS: Final = 0.03
"""Step times that differ by a smaller share count as the same: then the setting that changes less is taken."""

_GAPS: Final = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Shares of the tensors' peak that gaps may take, tried in turn for the message of a refusal."""

_STEP: Final = 10 << 20
"""Bytes to which the budget of such a message is rounded up."""

Combination = Sequence[Settings]
"""A value of each open lever."""


class Where(NamedTuple):
    """The card of each of so many processes that train together."""

    gpu: Gpu
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Fitted:
    """A plan that fits its budget.

    Attributes:
        plan: the plan with the settings that were chosen.
        settings: what was chosen and differs from the config.
        memory: what the run will take.
        budget: bytes of the GPU that it may take.
    """

    plan: Plan
    settings: Settings
    memory: PredictedMemory
    budget: int

    @property
    def peak(self) -> int:
        """Bytes of the GPU that the run will take, the CUDA context included."""
        return self.memory.peak + OUTSIDE

    @property
    def lines(self) -> list[str]:
        """The lines of a config that fix the choice."""
        return [f"{path} = {toml_value(value)}" for path, value in self.settings.items()]


def fitted(plan: Plan, where: Where, budget: int) -> Fitted:
    """The fastest settings that the config leaves open and whose run takes at most `budget` bytes.

    Raises ConfigError where none does, with the smallest peak that was found.
    """
    room, ladder = float(pool_bytes(budget)), _Ladder(plan, where)
    for each in [*ladder.candidates, ladder.least]:
        estimate = ladder.peak(each)
        if estimate < room or (each is ladder.least and estimate <= pool_bytes(budget)):
            found = _rehearsed(plan, _together(each), where, budget)
            if found is not None:
                return found
            room = min(room, estimate)  # gaps between blocks cost others as much
    raise ConfigError(_refusal(plan, _together(ladder.least), where, budget))


def _rehearsed(plan: Plan, settings: Settings, where: Where, budget: int) -> Fitted | None:
    """The plan with these settings if its whole run has enough in the pools of this budget."""
    tried = with_settings(plan, settings)
    try:
        memory = predicted_memory(tried, where.gpu, where.processes, pool_bytes(budget))
    except MemoryError:
        return None
    return Fitted(tried, {path: v for path, v in settings.items() if v != value_of(plan.config, path)}, memory, budget)


def refuse_if_beyond(plan: Plan, settings: Settings, where: Where, budget: int) -> Fitted:
    """A continued run, with the `settings` that were chosen when it began. Raises ConfigError if it is too much."""
    found = _rehearsed(plan, settings, where, budget)
    if found is not None:
        return found
    needed = _needed(with_settings(plan, settings), where)[1]
    chosen = ", ".join(f"{path} = {toml_value(value)}" for path, value in settings.items()) or "no setting changed"
    raise ConfigError(
        f"memory.budget: the run in {plan.config.output.dir} was begun with {chosen}, and these decide its result. "
        f"With them it takes {needed / GIB:.2f} GiB, and {budget / GIB:.2f} are allowed now. Set memory.budget to "
        f'"{math.ceil(needed / 2**20)} MiB" or more, or output.dir to another folder for a new run'
    )


def pool_bytes(budget: int) -> int:
    """Bytes of a budget that the plan gives to pools. Raises ConfigError if none are left."""
    pools = int((budget - OUTSIDE) * (1 - SPARE))
    if pools <= 0:
        raise ConfigError(
            f"memory.budget: expected more than the {OUTSIDE / GIB:.2f} GiB that the CUDA context alone takes, got "
            f"{budget / GIB:.2f} GiB"
        )
    return pools


def _needed(plan: Plan, where: Where) -> tuple[int, int]:
    """The peak of a plan's tensors, and a budget under which it runs: gaps between their blocks take some more."""
    peak = predicted_memory(plan, where.gpu, where.processes, _ENDLESS).peak
    for gaps in _GAPS:
        budget = math.ceil(((1 + gaps) * peak / (1 - SPARE) + OUTSIDE) / _STEP) * _STEP
        if _rehearsed(plan, {}, where, budget) is not None:
            return peak, budget
    return peak, 2 * peak + OUTSIDE


def _refusal(plan: Plan, least: Settings, where: Where, budget: int) -> str:
    """Why no settings fit, and what would: `least` takes the least memory."""
    peak, needed = _needed(with_settings(plan, least), where)
    changed = [f"{path} = {toml_value(v)}" for path, v in least.items() if v != value_of(plan.config, path)]
    with_them = f" with {', '.join(changed)}" if changed else ""
    fixed = [key for lever in LEVERS for key in lever.asked or lever.keys if given(plan.config, key)]
    grids = " or sample.width and sample.height" if plan.requests else ""
    remove = f"; or remove {', '.join(fixed)} from the config, so that the plan may choose them" if fixed else ""
    return (
        f"memory.budget: no settings keep this run within {budget / GIB:.2f} GiB: the least is {needed / GIB:.2f} GiB"
        f"{with_them}, of which {peak / GIB:.2f} are tensors and {OUTSIDE / GIB:.2f} the CUDA context. "
        f"Raise the budget, or lower data.resolution, data.batch_size, lora.rank{grids}{remove}"
    )


class _Ladder:
    """What the open settings save and cost, each measured alone and only when it is asked for."""

    def __init__(self, plan: Plan, where: Where) -> None:
        self._plan, self._where = plan, where
        self._known: dict[tuple[Stage, frozenset[tuple[str, object]]], Alone] = {}
        self.levers = [lever for lever in LEVERS if lever.is_open(plan.config)]
        """The settings that the config leaves open."""
        for lever in self.levers:
            if lever.live:
                self._measure(lever.values(plan.config))

    @cached_property
    def candidates(self) -> list[Combination]:
        """A value of each lever: the fastest first, and of those as fast the one that changes least."""
        found = [
            each
            for each in itertools.product(*(self._useful(lever) for lever in self.levers))
            if allowed(self._plan, _together(each))
        ]
        return sorted(found, key=self._rank)

    def _rank(self, each: Combination) -> tuple[int, int, float]:
        """By step time, of which predictions tell no less than `_TELLS`; then by how far the ladder was climbed."""
        seconds = self._estimate(Stage.STEP, each)[1]
        values = (lever.values(self._plan.config) for lever in self.levers)
        climbed = sum(own.index(settings) for own, settings in zip(values, each, strict=True))
        return round(math.log(seconds) / math.log(1 + _TELLS)), climbed, seconds

    @cached_property
    def least(self) -> Combination:
        """The candidate that should take the least."""
        return min(self.candidates, key=lambda each: (self.peak(each), len(self._changed(each))))

    def peak(self, each: Combination) -> float:
        """Bytes that the pools should need."""
        return max(self._estimate(stage, each)[0] for stage in Stage)

    def _useful(self, lever: Lever) -> list[Settings]:
        """The values of a lever of which each saves something in a stage, beside the config's own."""
        first, *others = lever.values(self._plan.config)
        if not allowed(self._plan, lever.needs):
            return [first]
        own = {stage: self._alone(stage, lever.needs).peak for stage in lever.stages}
        saving = [v for v in others if any(self._with(stage, lever, v).peak < own[stage] for stage in lever.stages)]
        return [first, *saving]

    def _estimate(self, stage: Stage, each: Combination) -> tuple[float, float]:
        """Peak and seconds of a stage: each setting changes what is held, what works and the time by a factor."""
        own = self._alone(stage, {})
        held, works, seconds, copying = float(own.held), float(own.peak - own.held), own.seconds, own.copying
        for lever, settings in zip(self.levers, each, strict=True):
            measured = Stage.STEP if stage is Stage.GRID and stage not in lever.stages else stage
            if measured not in lever.stages or not own.peak or settings == lever.values(self._plan.config)[0]:
                continue
            before, one = self._alone(measured, lever.needs), self._with(measured, lever, settings)
            if before.held:
                held *= one.held / before.held
                copying = (
                    one.copying * held / one.held if one.copying > before.copying else copying * one.held / before.held
                )
            if measured is stage:
                works *= (one.peak - one.held) / max(before.peak - before.held, 1)
                seconds *= one.seconds / before.seconds if before.seconds else 1.0
        return held + works, max(seconds, copying)

    def _with(self, stage: Stage, lever: Lever, settings: Settings) -> Alone:
        """A stage with one value of a lever, and what that needs."""
        return self._alone(stage, {**lever.needs, **settings})

    def _alone(self, stage: Stage, settings: Settings) -> Alone:
        """A stage with one setting changed."""
        key = stage, frozenset(self._changed([settings]).items())
        if key not in self._known:
            plan = with_settings(self._plan, settings)
            self._known[key] = _ALONE[stage](plan, *self._where)
        return self._known[key]

    def _measure(self, values: Sequence[Settings]) -> None:
        """A step with each value of a setting that a loaded network can change."""
        fitting = [one for one in values if allowed(self._plan, one)]
        found = steps_alone([with_settings(self._plan, one) for one in fitting], *self._where)
        for settings, alone in zip(fitting, found, strict=True):
            self._known[Stage.STEP, frozenset(self._changed([settings]).items())] = alone

    def _changed(self, each: Sequence[Settings]) -> dict[str, object]:
        """The settings that differ from the config's."""
        return {path: value for path, value in _together(each).items() if value != value_of(self._plan.config, path)}


def _together(each: Sequence[Settings]) -> dict[str, object]:
    return {path: value for settings in each for path, value in settings.items()}
