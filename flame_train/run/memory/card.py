"""The memory of a card: a run within `memory.budget`, the blocks that "auto" streams, and the host's room for these."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flame_train.config.training_sections import AUTO, bytes_of
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.host_memory import available
from flame_train.engine.shape_run import H100, Gpu, gpu_of, shape_run
from flame_train.errors import ConfigError, EnvironmentFault, OutOfMemory, is_out_of_memory
from flame_train.io.json_values import toml_tree
from flame_train.run.check.adapted_layers import block_sizes, blocks_of_share
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.plan import Plan
from flame_train.run.train.sample_grids import load_preview
from flame_train.run.train.step_state import load_denoiser
from flame_train.training.session import Session

from .budget import GIB, OUTSIDE, Cards, FittedPlan, fit_budget, refuse_if_beyond
from .options import MEMORY_OPTIONS, Settings, value_of
from .prediction import PredictedMemory, predicted_memory

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
        """Finds this machine's; where there is none, one that is described, of which nobody else has anything."""
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

    def budget(self, setting: str) -> int:
        """Returns the bytes of a budget. Raises ConfigError for more than the card has, or than is free."""
        shared = self.others > _NOTED
        if setting == AUTO:
            room = self.free + CONTEXT - RESERVE
            if shared:
                _LOG.warning(
                    'memory.budget = "auto": other processes have %.1f of the card\'s %.1f GiB; this run takes at most '
                    "%.1f, and %.1f stay free",
                    *(size / GIB for size in (self.others, self.gpu.memory, room, RESERVE)),
                )
            return room
        room = bytes_of(setting)
        if room > self.gpu.memory:
            raise ConfigError(
                f"memory.budget: expected at most the {self.gpu.memory / GIB:.2f} GiB of the card, got {setting}; "
                '"auto" takes what is free'
            )
        if shared and room > self.free + CONTEXT:
            raise ConfigError(
                f"memory.budget: {setting} are not free: other processes have {self.others / GIB:.2f} of the card's "
                f'{self.gpu.memory / GIB:.2f} GiB; end them, or set "auto", which takes what is free'
            )
        return room


def within_budget(plan: Plan, session: Session, *, planning: bool = False) -> FittedPlan | None:
    """Returns the plan with what was chosen for its budget; None where it has none.

    Where it is only `planning`, "cpu" plans for a described card, as a machine without a GPU does. A run that is
    continued keeps what was chosen when it began. Raises ConfigError where no settings fit.
    """
    setting = plan.config.memory.budget
    if not setting:
        return None
    if session.device == "cpu" and not planning:
        raise ConfigError(
            "memory.budget: it limits a GPU's memory, and --device is cpu; remove it, or plan for a GPU by --dry-run"
        )
    card, group = Card.of(session.device), session.group
    budget = min(map(int, map(json.loads, group.all_gather(json.dumps(card.budget(setting))))))
    cards, earlier = Cards(card.gpu, group.world), chosen_before(plan)
    if earlier is None:
        return fit_budget(plan, cards, budget)
    return refuse_if_beyond(plan, earlier, cards, budget)


def chosen_before(plan: Plan) -> Settings | None:
    """Returns what the run in the plan's folder was begun with, of the settings that the config leaves open.

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
    settings: dict[str, Any] = {}
    for option in MEMORY_OPTIONS:
        if option.is_open(plan.config):
            values = option.values(plan.config)
            same = [v for v in values if all(_written(before, p) == value for p, value in v.items())]
            settings |= same[0] if same else values[0] if option.has_auto(plan.config) else {}
    return settings


def _written(tree: dict[str, Any], path: str) -> Any:
    section, name = path.split(".")
    table = tree.get(section)
    return table.get(name) if isinstance(table, dict) else None


@contextmanager
def limit_pools(device: str, fitted: FittedPlan | None) -> Iterator[None]:
    """Limits the device's pools to what the budget leaves them. Raises OutOfMemory where that is reached."""
    if fitted is None:
        yield
        return
    backend = get_backend(device)
    backend.limit_memory(fitted.budget - OUTSIDE)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        full = fitted.plan.config.gradient.checkpointing == "full"
        hint = "" if full else ', or set gradient.checkpointing = "full"'
        raise OutOfMemory(
            f"the run reached its memory.budget of {fitted.budget / GIB:.2f} GiB, of which {fitted.peak / GIB:.2f} "
            f"were predicted: {error}; raise it{hint}"
        ) from error
    finally:
        backend.limit_memory(0)


def log_budget(fitted: FittedPlan) -> None:
    """Says what was chosen, what it takes, and the lines of a config that fix it."""
    chosen = ", ".join(fitted.lines) or "the config as it is"
    _LOG.info(
        "memory.budget of %.2f GiB: %s; predicted: %.2f GiB, the CUDA context included, and %.0f ms a step",
        fitted.budget / GIB,
        chosen,
        fitted.peak / GIB,
        fitted.memory.seconds * 1e3,
    )


_LEFT = 1 << 30  # bytes of the GPU for what the prediction leaves out: the CUDA context and its kernels
_STEP = 1 / 16  # by which a share is raised until a run fits


def resolve_offload(plan: Plan, gpu: Gpu | None, processes: int = 1) -> Plan:
    """Decides which blocks "auto" streams on a GPU: as few as fit its memory. On the CPU it streams none."""
    if plan.config.model.offload != "auto" or gpu is None:
        return plan

    def streaming(share: float) -> Plan:
        names = blocks_of_share({n: s for n, s in sizes.items() if n in plan.checked.checkpointed}, share)
        return replace(plan, checked=replace(plan.checked, streamed=frozenset(names), streamed_text=text))

    def predicted(share: float) -> PredictedMemory:
        return predicted_memory(streaming(share), gpu, processes)

    sizes, room, text = block_sizes(plan.model.network), gpu.memory - _LEFT, 0.0
    resident = predicted(0.0)
    text = float(resident.encoding > room)
    if resident.training <= room:
        return streaming(0.0)
    share = min((resident.training - room) / max(resident.training - predicted(1.0).training, 1), 1.0)
    while share < 1.0 and predicted(share).training > room:
        share = min(share + _STEP, 1.0)
    return streaming(share)


def keeps_on_host(plan: Plan) -> bool:
    """Tells whether weights wait in host memory for good."""
    text = plan.checked.streamed_text and plan.encoding.text
    return bool(plan.checked.streamed or text or plan.checked.sample_model is not plan.model)


def refuse_small_host(plan: Plan, copies: int = 1) -> None:
    """Raises OutOfMemory if the host has too little memory for the weights that wait there; nothing is loaded yet.

    Args:
        copies: how often its processes keep them.
    """
    if not keeps_on_host(plan):
        return
    preview, text = plan.checked.sample_model, plan.checked.streamed_text and plan.encoding.text
    with shape_run(H100) as run:
        loaded_parts: list[object] = [load_encoders(plan.encoding, "cuda")] if text else []
        encoders = run.host_bytes
        loaded_parts.clear()
        loaded_parts.append(denoiser := load_denoiser(plan, "cuda"))
        if preview is not plan.model:
            loaded_parts.append(load_preview(preview, plan.config, denoiser, "cuda"))
        rest = run.host_bytes
    needed, room = copies * max(encoders, rest), available()
    if needed > room:
        needed_gib, free = (f"{n / 2**30:.2f} GiB" for n in (needed, room))
        advice = ["raise memory.budget" if plan.config.memory.budget else "lower model.offload"]
        if preview is not plan.model:
            advice.append("set sample.every = 0 or remove sample.model")
        key = "text_encoders.precision" if encoders > rest else "model.quantize"
        kept = value_of(plan.config, key)
        if kept != "nf4":
            fewer = '"nf4"' if kept in ("fp8", "int8", "int8-convrot") else '"fp8" or "nf4"'
            advice.append(f"store them in fewer bits by {key} = {fewer}")
        raise OutOfMemory(
            f"{needed_gib} of weights are to wait in host memory, which has {free} free; {', or '.join(advice)}"
        )
