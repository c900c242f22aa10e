"""A memory budget: the fastest settings whose run fits under it, among those that the config leaves to the plan.

What each setting of the ladder (`options.py`) saves and costs is measured on shapes, one setting at a time.
Combinations come in the order of their estimated step time. The first whose whole run does not run out of memory,
rehearsed on shapes with pools of the budget's size, is taken.
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
from flame_train.run.plan.plan import Plan

from .options import MEMORY_OPTIONS, MemoryOption, Settings, Stage, allowed, given, value_of, with_settings
from .prediction import (
    Alone,
    PredictedMemory,
    decoding_alone,
    encode_captions,
    encode_images,
    encoding_alone,
    predicted_memory,
    steps_alone,
)

GIB: Final = 2**30

OUTSIDE: Final = 1 << 30
"""Bytes of the GPU that a run takes beside its pools: the CUDA context, code of kernels and libraries, and graphs.

Measured on an H100: 0.62 GiB for Flux, and 0.86 for SDXL, whose convolutions load much of cuDNN.
"""

SPARE: Final = 0.03
"""The share of the pools that the plan leaves unused: predictions err by so much, and other buckets take a little."""

_ALONE: Final[Mapping[Stage, Callable[[Plan, Gpu, int], Alone]]] = {
    Stage.CAPTIONS: partial(encoding_alone, encode_captions),
    Stage.IMAGES: partial(encoding_alone, encode_images),
    Stage.STEP: lambda plan, gpu, processes: steps_alone([plan], gpu, processes)[0],
    Stage.DECODING: decoding_alone,
}

_TELLS: Final = 0.03
"""Step times that differ by a smaller share count as the same: then the setting that changes less is taken."""

_MORE: Final = (0.0, 0.03, 0.1, 0.3)
"""By what share a limit that a rehearsal reached is raised, tried in turn for the message of a refusal."""

_STEP: Final = 10 << 20
"""Bytes to which the budget of such a message is rounded up."""

Combination = Sequence[Settings]
"""A value of each open option."""


class Cards(NamedTuple):
    """The card of each of so many processes that train together."""

    gpu: Gpu
    processes: int = 1


@dataclass(frozen=True, slots=True)
class FittedPlan:
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


def fit_budget(plan: Plan, cards: Cards, budget: int) -> FittedPlan:
    """Returns the fastest settings left open whose run takes at most `budget` bytes. ConfigError where none does."""
    candidates = Candidates(plan, cards)
    pools = room = float(pool_bytes(budget))
    tried: PredictedMemory | None = None
    for each in [*candidates.ordered, candidates.least]:
        estimate = candidates.peak(each)
        if estimate < room or (each is candidates.least and tried is None and estimate <= pools):
            fitted = _measure_run(plan, _merged(each), cards, budget)
            if isinstance(fitted, FittedPlan):
                return fitted
            room = min(room, estimate)  # gaps between blocks cost others as much
            tried = fitted if each is candidates.least else None
    raise ConfigError(_refusal(plan, _merged(candidates.least), cards, budget, tried))


def _measure_run(plan: Plan, settings: Settings, cards: Cards, budget: int) -> FittedPlan | PredictedMemory:
    """Runs a plan with these settings on shapes: the plan if the pools of this budget suffice, else what it needs."""
    tried, pools = with_settings(plan, settings), pool_bytes(budget)
    memory = predicted_memory(tried, cards.gpu, cards.processes, pools, grows=True)
    if memory.pools > pools:
        return memory
    return FittedPlan(
        tried, {path: v for path, v in settings.items() if v != value_of(plan.config, path)}, memory, budget
    )


def refuse_if_beyond(plan: Plan, settings: Settings, cards: Cards, budget: int) -> FittedPlan:
    """Predicts a continued run, with the `settings` chosen when it began. Raises ConfigError if it is too much."""
    fitted = _measure_run(plan, settings, cards, budget)
    if isinstance(fitted, FittedPlan):
        return fitted
    needed = _needed(with_settings(plan, settings), cards, fitted)
    chosen = ", ".join(f"{path} = {toml_value(value)}" for path, value in settings.items()) or "no setting changed"
    raise ConfigError(
        f"memory.budget: the run in {plan.config.output.dir} was begun with {chosen}, and these decide its result. "
        f"With them it takes {needed / GIB:.2f} GiB, and {budget / GIB:.2f} are allowed now. Set memory.budget to "
        f'"{math.ceil(needed / 2**20)} MiB" or more, or output.dir to another folder for a new run'
    )


def pool_bytes(budget: int) -> int:
    """Returns bytes of a budget that the plan gives to pools. Raises ConfigError if none are left."""
    pools = int((budget - OUTSIDE) * (1 - SPARE))
    if pools <= 0:
        raise ConfigError(
            f"memory.budget: expected more than the {OUTSIDE / GIB:.2f} GiB that the CUDA context alone takes, got "
            f"{budget / GIB:.2f} GiB"
        )
    return pools


def _needed(plan: Plan, cards: Cards, tried: PredictedMemory) -> int:
    """Computes a budget under which a plan runs that took the pools of `tried`: its gaps lie elsewhere then."""
    for more in _MORE:
        budget = math.ceil((tried.pools * (1 + more) / (1 - SPARE) + OUTSIDE) / _STEP) * _STEP
        if isinstance(_measure_run(plan, {}, cards, budget), FittedPlan):
            return budget
    return 2 * tried.pools + OUTSIDE


def _refusal(plan: Plan, least: Settings, cards: Cards, budget: int, tried: PredictedMemory | None) -> str:
    """Says why no settings fit, and what would."""
    cheapest = with_settings(plan, least)
    memory = tried or predicted_memory(cheapest, cards.gpu, cards.processes, pool_bytes(budget), grows=True)
    needed = _needed(cheapest, cards, memory)
    changed = [f"{path} = {toml_value(v)}" for path, v in least.items() if v != value_of(plan.config, path)]
    with_them = f" with {', '.join(changed)}" if changed else ""
    fixed = [key for option in MEMORY_OPTIONS for key in option.asked or option.keys if given(plan.config, key)]
    grids = " or sample.width and sample.height" if plan.requests else ""
    remove = f"; or remove {', '.join(fixed)} from the config, so that the plan may choose them" if fixed else ""
    return (
        f"memory.budget: no settings keep this run within {budget / GIB:.2f} GiB: the least is {needed / GIB:.2f} GiB"
        f"{with_them}, of which {memory.peak / GIB:.2f} are tensors and {OUTSIDE / GIB:.2f} the CUDA context. "
        f"Raise the budget, or lower data.resolution, data.batch_size, lora.rank{grids}{remove}"
    )


class Candidates:
    """What the open settings save and cost, each measured alone and only when it is asked for."""

    def __init__(self, plan: Plan, cards: Cards) -> None:
        self.options = [option for option in MEMORY_OPTIONS if option.is_open(plan.config)]
        """The settings that the config leaves open."""
        self._values = {option: option.values(plan.config) for option in self.options}
        self._plan = with_settings(plan, _merged([values[0] for values in self._values.values()]))
        self._cards = cards
        self._known: dict[tuple[Stage, frozenset[tuple[str, object]]], Alone] = {}
        self._estimates: dict[tuple[Stage, frozenset[tuple[str, object]]], _Estimate] = {}
        for option in self.options:
            if option.live:
                self._measure(self._values[option])

    @cached_property
    def ordered(self) -> list[Combination]:
        """A value of each option: the fastest first, and of those as fast the one that changes least."""
        useful = [self._useful(option) for option in self.options]
        barred = self._barred(useful)
        allowed_choices = [
            each for each in itertools.product(*useful) if not any(pair <= _items(each) for pair in barred)
        ]
        return sorted(allowed_choices, key=self._rank)

    def _barred(self, useful: Sequence[Sequence[Settings]]) -> list[frozenset[tuple[str, object]]]:
        """Returns pairs of values that break a rule: of an option, and of one of which it needs a value."""
        barred = []
        for option, values in zip(self.options, useful, strict=True):
            for other, others in zip(self.options, useful, strict=True):
                if set(other.keys) & set(option.needs):
                    pairs = itertools.product(values, others)
                    barred += [_items(pair) for pair in pairs if not allowed(self._plan, _merged(pair))]
        return barred

    def _rank(self, each: Combination) -> tuple[int, int, float]:
        """Ranks by step time, of which predictions tell no less than `_TELLS`; then by the climb up the ladder."""
        seconds = self._estimate(Stage.STEP, each).seconds
        climbed = sum(self._values[option].index(value) for option, value in zip(self.options, each, strict=True))
        return round(math.log(seconds) / math.log(1 + _TELLS)), climbed, seconds

    @cached_property
    def least(self) -> Combination:
        """The candidate that should take the least."""
        return min(self.ordered, key=lambda each: (self.peak(each), len(self._changed(each))))

    def peak(self, each: Combination) -> float:
        """Returns bytes that the pools should need. Sample images are decoded beside what a step holds."""
        captions, images, step, decoding = (self._estimate(stage, each) for stage in Stage)
        training = step.held + decoding.held + max(step.works, self._alone(Stage.STEP, {}).sampling, decoding.works)
        return max(captions.held + captions.works, images.held + images.works, training)

    def _useful(self, option: MemoryOption) -> list[Settings]:
        """Returns the values of an option of which each saves something in a stage, beside the config's own."""
        first, *others = self._values[option]
        others = [value for value in others if allowed(self._plan, {**self._needs(option), **value})]
        if not others or not allowed(self._plan, self._needs(option)):
            return [first]
        peaks = {stage: self._alone(stage, self._needs(option)).peak for stage in option.stages}
        saving = [v for v in others if any(self._with(stage, option, v).peak < peaks[stage] for stage in option.stages)]
        return [first, *saving]

    def _needs(self, option: MemoryOption) -> Settings:
        """Returns what the option needs, as far as the config leaves it open."""
        is_open = {key for one in self.options for key in one.keys}
        return {key: value for key, value in option.needs.items() if key in is_open}

    def _estimate(self, stage: Stage, each: Combination) -> _Estimate:
        """Estimates a stage: a setting that changes it changes what is held, what works and the time by a factor."""
        chosen = [(option, own) for option, own in zip(self.options, each, strict=True) if stage in option.stages]
        key = stage, _items([own for _, own in chosen])
        if key not in self._estimates:
            own = self._alone(stage, {})
            found = _Estimate(own.held, own.works, own.seconds, own.copying)
            for option, settings in chosen:
                if own.peak and settings != self._values[option][0]:
                    before = self._alone(stage, self._needs(option))
                    found = found.changed(before, self._with(stage, option, settings))
            self._estimates[key] = found
        return self._estimates[key]

    def _with(self, stage: Stage, option: MemoryOption, settings: Settings) -> Alone:
        """Returns a stage with one value of an option, and what that needs."""
        needs, last = self._needs(option), self._values[option][-1]
        if option.fractions is None or settings == last:
            return self._alone(stage, {**needs, **settings})
        way = option.fractions(self._plan, settings)
        return self._alone(stage, needs).towards(self._alone(stage, {**needs, **last}), *way)

    def _alone(self, stage: Stage, settings: Settings) -> Alone:
        """Returns a stage with one setting changed."""
        key = stage, frozenset(self._changed([settings]).items())
        if key not in self._known:
            plan = with_settings(self._plan, settings)
            self._known[key] = _ALONE[stage](plan, *self._cards)
        return self._known[key]

    def _measure(self, values: Sequence[Settings]) -> None:
        """Measures a step with each value of a setting that a loaded network can change."""
        fitting = [one for one in values if allowed(self._plan, one)]
        stages = steps_alone([with_settings(self._plan, one) for one in fitting], *self._cards)
        for settings, alone in zip(fitting, stages, strict=True):
            self._known[Stage.STEP, frozenset(self._changed([settings]).items())] = alone

    def _changed(self, each: Sequence[Settings]) -> dict[str, object]:
        """Returns the settings that differ from the config's."""
        return {path: value for path, value in _merged(each).items() if value != value_of(self._plan.config, path)}


class _Estimate(NamedTuple):
    """A stage of a combination: bytes held and worked in, seconds of the work, and of copies beside it."""

    held: float
    works: float
    computing: float
    copying: float

    @property
    def seconds(self) -> float:
        """Of both, which go on at the same time."""
        return max(self.computing, self.copying)

    def changed(self, before: Alone, one: Alone) -> _Estimate:
        """Adds one more setting, which changes `before` to `one`. Copies shrink with what they copy."""
        held, copying = self.held, self.copying
        if before.held:
            held *= one.held / before.held
            copying = (
                one.copying * held / one.held if one.copying > before.copying else copying * one.held / before.held
            )
        works = self.works * one.works / max(before.works, 1)
        return _Estimate(held, works, self.computing * (one.seconds / before.seconds if before.seconds else 1), copying)


def _items(each: Sequence[Settings]) -> frozenset[tuple[str, object]]:
    return frozenset(_merged(each).items())


def _merged(each: Sequence[Settings]) -> dict[str, object]:
    return {path: value for settings in each for path, value in settings.items()}
