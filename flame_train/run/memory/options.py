"""The ladder of a memory budget: the settings that the plan may choose where the config says nothing of them.

Each is an entry of `MEMORY_OPTIONS`. A new setting that saves memory is one more entry. What it costs and saves is
measured on shapes (`budget.py`), so nothing else needs to know it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final

from flame_train.config.checks import broken
from flame_train.config.schema import Config
from flame_train.data.samples import Samples
from flame_train.diffusion.objective_kind import OBJECTIVES
from flame_train.errors import ConfigError
from flame_train.networks.block_offload import BUFFERS
from flame_train.run.check.adapted_layers import block_sizes, blocks_named, blocks_streamed, text_share
from flame_train.run.plan.plan import Plan

Settings = Mapping[str, Any]
"""Values of keys, by path."""


class Stage(Enum):
    """A part of a run whose memory a setting changes."""

    CAPTIONS = auto()
    IMAGES = auto()
    STEP = auto()
    DECODING = auto()


@dataclass(frozen=True, slots=True, eq=False)
class MemoryOption:
    """A setting of a config that saves memory.

    Attributes:
        keys: the keys that it sets. It is the plan's to choose where the config gives none of `asked`.
        stages: the stages whose memory it changes; what a step holds, sample images hold too.
        values: its settings for a config. The first is the config's own; each saves more than the one before.
        asked: the keys of a user who chooses himself; empty: `keys`.
    """

    keys: tuple[str, ...]
    stages: frozenset[Stage]
    values: Callable[[Config], Sequence[Settings]]
    asked: tuple[str, ...] = ()
    needs: Settings = field(default_factory=dict)
    """What must be set for its values to be measured: they mean nothing alone."""
    live: bool = False
    """Whether a loaded network can change it, so that its values are measured in one go."""
    fractions: Callable[[Plan, Settings], tuple[float, float]] | None = None
    """How far a value lies between the first and the last, which alone are measured: in memory, and in copies."""

    def is_open(self, config: Config) -> bool:
        """Tells whether the config leaves it to the plan."""
        return self.has_auto(config) or not any(given(config, key) for key in self.asked or self.keys)

    def has_auto(self, config: Config) -> bool:
        """Tells whether the config says "auto", and the plan has other values for it."""
        values = self.values(config)
        return any(value_of(config, key) == "auto" != values[0][key] for key in self.keys)


def _one_of(key: str, *values: str | int, stages: set[Stage], live: bool = False) -> MemoryOption:
    """Returns a key with values that save more and more; the first is its default."""
    return MemoryOption((key,), frozenset(stages), lambda _: [{key: value} for value in values], live=live)


def _micro_batches(config: Config) -> list[Settings]:
    """Cuts the batch into one, two, four ... micro-batches of an update, while it can be halved."""
    settings: list[Settings] = []
    size, parts = config.data.batch_size, config.gradient.accumulation
    of_sets = any("batch_size" in one.model_fields_set for one in config.data.sets)
    while True:
        settings.append({"data.batch_size": size, "gradient.accumulation": parts})
        if size % (2 * max(1, len(OBJECTIVES.chosen(config.loss).group))) or of_sets:
            return settings
        size, parts = size // 2, parts * 2


def _streamed(plan: Plan, settings: Settings) -> tuple[float, float]:
    """Estimates a share of the blocks: less memory is saved than copies cost, for their buffers stay the same."""
    share = settings["model.offload"]
    if share == "off":
        return 0.0, 0.0
    sizes = block_sizes(plan.model.network).values()
    buffers = BUFFERS * max(sizes) / sum(sizes)
    return max((share - buffers) / (1.0 - buffers), 0.0) if buffers < 1 else float(share), float(share)


MEMORY_OPTIONS: Final = (
    MemoryOption(
        ("data.batch_size", "gradient.accumulation"),
        frozenset({Stage.STEP}),
        _micro_batches,
        asked=("gradient.accumulation",),
    ),
    _one_of("gradient.checkpointing", "off", "mlp", "full", "offload", stages={Stage.STEP}, live=True),
    _one_of("model.quantize", "off", "fp8", stages={Stage.STEP}),
    MemoryOption(
        ("model.offload",),
        frozenset({Stage.STEP, Stage.CAPTIONS}),
        lambda _: [{"model.offload": value} for value in ("off", 0.25, 0.5, 0.75, 1.0)],
        needs={"gradient.checkpointing": "full"},
        fractions=_streamed,
    ),
    _one_of("text_encoders.precision", "auto", "fp8", stages={Stage.CAPTIONS}),
    _one_of("model.vae_tile", 0, 512, stages={Stage.IMAGES, Stage.DECODING}),
    _one_of("model.vae_precision", "fp32", "bf16", stages={Stage.IMAGES, Stage.DECODING}),
)
"""In the order of messages. Of settings with the same step time the plan takes the one that changes the fewest keys."""


def given(config: Config, path: str) -> bool:
    """Tells whether the user wrote the key, be it with its default."""
    section, name = path.split(".")
    return name in getattr(config, section).model_fields_set


def value_of(config: Config, path: str) -> Any:
    """Returns the value of a key."""
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def with_settings(plan: Plan, settings: Settings) -> Plan:
    """Returns the plan with these settings. Raises ConfigError where one of them does not fit another."""
    old, config = plan.config, plan.config
    for path, value in settings.items():
        section, name = path.split(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    blocks = blocks_named(plan.model.network, config.gradient.checkpointing, config.gradient.checkpoint_blocks)
    checked = replace(plan.checked, config=config, checkpointed=blocks)
    if "model.offload" in settings:
        offload = config.model.offload
        names = blocks_streamed(plan.model.network, offload, config.gradient.checkpointing, blocks)
        checked = replace(checked, streamed=names, streamed_text=text_share(offload))
    if config.data.batch_size == old.data.batch_size:
        return replace(plan, checked=checked)
    size = config.data.batch_size
    return replace(
        plan, checked=checked, samples=_in_batches(plan.samples, size), held_out=_in_batches(plan.held_out, size)
    )


def _in_batches(samples: Samples, size: int) -> Samples:
    """Returns the samples in batches of another size."""
    sets = {id(image_set): image_set.model_copy(update={"batch_size": size}) for image_set in samples.sets}
    rows = tuple(replace(row, set=sets[id(row.set)]) for row in samples.rows)
    return Samples(tuple(sets.values()), rows, samples.notices)


def encodings(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with each way to encode that its budget may choose; without a budget the plan alone."""
    decisive = {Stage.CAPTIONS, Stage.IMAGES} if plan.config.memory.budget else set()
    options = [
        one for one in MEMORY_OPTIONS if one.stages & decisive and not one.fractions and one.is_open(plan.config)
    ]
    for each in itertools.product(*(option.values(plan.config) for option in options)):
        yield with_settings(plan, {path: value for settings in each for path, value in settings.items()})


def allowed(plan: Plan, settings: Settings) -> bool:
    """Tells whether settings fit each other, and break no rule between keys that the config does not break."""
    try:
        changed = with_settings(plan, settings)
    except ConfigError:
        return False
    return set(broken(changed.config)) <= set(broken(plan.config))
