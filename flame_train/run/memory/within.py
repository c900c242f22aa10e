"""A run within its memory budget: how much `memory.budget` is on this card, what was chosen for it, and its limit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.config.memory import AUTO, bytes_of
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine.backend import get_backend
from flame_train.engine.shape_run import Gpu, gpu_of
from flame_train.errors import ConfigError, EnvironmentFault, OutOfMemory, is_out_of_memory
from flame_train.io.json_values import toml_tree
from flame_train.run.plan.plan import Plan

from .budget import GIB, OUTSIDE, Fitted, Where, fitted, refuse_if_beyond
from .options import MEMORY_OPTIONS, Settings

_LOG = logging.getLogger(__name__)

RESERVE: Final = 512 << 20
"""Bytes that "auto" leaves free: for a display, and for what other programs take later."""

_NOTED: Final = 256 << 20
"""Bytes that others have of a card, from which on it counts as shared."""

CONTEXT: Final = 640 << 20
"""Bytes that this process has of a card when it asks what is free: its CUDA context."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, and the bytes of it that this process could take beside its CUDA context."""

    gpu: Gpu
    free: int

    @classmethod
    def of(cls, device: str) -> Card:
        """This machine's; where there is none, one that is described, of which nobody else has anything."""
        gpu = gpu_of(device)
        if not gpu.name:
            return cls(gpu, gpu.memory - CONTEXT)
        try:
            return cls(gpu, get_backend(device).free_memory())
        except EnvironmentFault:
            return cls(gpu, gpu.memory - CONTEXT)

    @property
    def others(self) -> int:
        """Bytes that other processes have, about."""
        return max(self.gpu.memory - CONTEXT - self.free, 0)

    def budget(self, asked: str) -> int:
        """The bytes of a budget. Raises ConfigError for more than the card has, or than is free."""
        shared = self.others > _NOTED
        if asked == AUTO:
            found = self.free + CONTEXT - RESERVE
            if shared:
                _LOG.warning(
                    'memory.budget = "auto": other processes have %.1f of the card\'s %.1f GiB; this run takes at most '
                    "%.1f, and %.1f stay free",
                    *(size / GIB for size in (self.others, self.gpu.memory, found, RESERVE)),
                )
            return found
        found = bytes_of(asked)
        if found > self.gpu.memory:
            raise ConfigError(
                f"memory.budget: expected at most the {self.gpu.memory / GIB:.2f} GiB of the card, got {asked}; "
                '"auto" takes what is free'
            )
        if shared and found > self.free + CONTEXT:
            raise ConfigError(
                f"memory.budget: {asked} are not free: other processes have {self.others / GIB:.2f} of the card's "
                f'{self.gpu.memory / GIB:.2f} GiB; end them, or set "auto", which takes what is free'
            )
        return found


def within_budget(plan: Plan, device: str, group: ProcessGroup = ALONE, *, planning: bool = False) -> Fitted | None:
    """The plan with what was chosen for its budget; None where it has none.

    Where it is only `planning`, "cpu" plans for a described card, as a machine without a GPU does. A run that is
    continued keeps what was chosen when it began. Raises ConfigError where no settings fit.
    """
    asked = plan.config.memory.budget
    if not asked:
        return None
    if device == "cpu" and not planning:
        raise ConfigError(
            "memory.budget: it limits a GPU's memory, and --device is cpu; remove it, or plan for a GPU by --dry-run"
        )
    card = Card.of(device)
    budget = min(map(int, map(json.loads, group.all_gather(json.dumps(card.budget(asked))))))
    where, kept = Where(card.gpu, group.world), chosen_before(plan)
    if kept is None:
        return fitted(plan, where, budget)
    return refuse_if_beyond(plan, kept, where, budget)


def chosen_before(plan: Plan) -> Settings | None:
    """What the run in the plan's folder was begun with, of the settings that the config leaves open.

    None where there is no run, or it had no budget. What is no choice of the ladder is left to the comparison of
    configs, which refuses it.
    """
    try:
        text = (Path(plan.config.output.dir) / "config.toml").read_text(encoding="utf-8")
        before: dict[str, Any] = toml_tree(text)
        if not before["memory"]["budget"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found: dict[str, Any] = {}
    for option in MEMORY_OPTIONS:
        if option.is_open(plan.config):
            values = option.values(plan.config)
            same = [v for v in values if all(_written(before, p) == value for p, value in v.items())]
            found |= same[0] if same else values[0] if option.has_auto(plan.config) else {}
    return found


def _written(tree: dict[str, Any], path: str) -> Any:
    section, name = path.split(".")
    table = tree.get(section)
    return table.get(name) if isinstance(table, dict) else None


@contextmanager
def limited(device: str, found: Fitted | None) -> Iterator[None]:
    """Inside, the device's pools give no more than the budget leaves them. Raises OutOfMemory where that is reached."""
    if found is None:
        yield
        return
    backend = get_backend(device)
    backend.limit_memory(found.budget - OUTSIDE)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"the run reached its memory.budget of {found.budget / GIB:.2f} GiB, of which {found.peak / GIB:.2f} were "
            f'predicted: {error}; raise it, or set gradient.checkpointing = "full"'
        ) from error
    finally:
        backend.limit_memory(0)


def tell(found: Fitted) -> None:
    """Says what was chosen, what it takes, and the lines of a config that fix it."""
    chosen = ", ".join(found.lines) or "the config as it is"
    _LOG.info(
        "memory.budget of %.2f GiB: %s; predicted: %.2f GiB, the CUDA context included, and %.0f ms a step",
        found.budget / GIB,
        chosen,
        found.peak / GIB,
        found.memory.seconds * 1e3,
    )
