"""Where a run starts: at a checkpoint of its own folder, with that of another run, or anew.

A run that `train.continue_from` names gives its newest checkpoint, checked against the plan before anything loads.
Carried over are the LoRA in fp32, the state of the optimizer's rule with its count of updates, and a moving average.
What begins anew: the step, the schedule with its warm-up, the order of samples, the random numbers of a step, the loss
scale, the log. Every setting may differ but the optimizer's name and the sizes and scales of the adapters' matrices.
"""

from __future__ import annotations

import itertools
import logging
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flame_train.config.render import resolved
from flame_train.config.resume import differences, incompatible_settings
from flame_train.config.schema import Config
from flame_train.disk.files import preflight, reading
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.errors import ConfigError, OutputError, counted
from flame_train.io.commit import STATES, Found, count, newest
from flame_train.io.runfolder import RunFolder
from flame_train.run.plan.encoding import Keys, could_cache
from flame_train.run.plan.plan import Plan
from flame_train.run.plan.sources import changed_images
from flame_train.training.result import (
    Sources,
    check_sources,
    earlier_updates,
    knows_sources,
    micro_batches_of,
    updates_done,
    value_shapes,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts with.

    Attributes:
        found: the checkpoint to continue from; None: a fresh run.
        before: the checkpoint of another run that a fresh run begins with; None: it begins with nothing.
        sources: the digests of the files that the run is made from.
    """

    found: Found | None
    before: Found | None
    sources: Sources

    def count_earlier_updates(self) -> int:
        """Reads how many updates the optimizer's state has seen before this run."""
        if self.found is not None:
            return earlier_updates(self.found)
        return updates_done(self.before) if self.before is not None else 0


def continued(plan: Plan) -> Found | None:
    """The checkpoint that a new run begins with; None where the config names no other run.

    Raises ConfigError where there is none, or its state does not fit, OutputError where it cannot be read.
    """
    c = plan.config
    if not c.train.continue_from:
        return None
    run = Path(c.train.continue_from)
    if getattr(c.lora, "from"):
        raise ConfigError("train.continue_from: it begins with a LoRA, and lora.from with another; empty one of them")
    settings = run / "config.toml"
    if not settings.is_file():
        raise ConfigError(f"train.continue_from: expected the folder of a run, got {run}, which has no config.toml")
    found = newest(run / "checkpoints")
    if found is None:
        raise ConfigError(f"train.continue_from: {run} has no checkpoint; train it for checkpoint.every steps or more")
    with reading(settings):
        old = settings.read_text(errors="replace")
    wrong = incompatible_settings(old, c) or _other_layers(plan, value_shapes(found))
    if wrong:
        raise ConfigError(
            f"train.continue_from: the optimizer's state of {found.path} does not fit this config:\n{wrong}\n"
            f'set them as they were there, or begin with the LoRA alone, by lora.from = "{_lora_of(found)}"'
        )
    return found


def way_on(source: str | None, overrides: Sequence[str], device: str, config: Config) -> str:
    """The command that goes on from the run in the folder of a config, with its settings, in a new folder.

    Args:
        source: the config's file; None: it is none.
        overrides: `section.key=value`, on top of it.
        device: where it trains.
        config: all of it.

    Returns:
        A line for a message; empty where the run has no checkpoint, or none that fits.
    """
    run = Path(config.output.dir)
    try:
        unfit = newest(run / "checkpoints") is None or incompatible_settings((run / "config.toml").read_text(), config)
    except (OSError, OutputError):
        return ""
    if unfit:
        return ""
    free = next(place for n in itertools.count(2) if not (place := run.with_name(f"{run.name}-{n}")).exists())
    if source is None:
        return f'\nto go on from it with these settings: train.continue_from = "{run}", output.dir = "{free}"'
    taken = ("output.dir", "train.continue_from")
    words = [word for each in overrides if each.partition("=")[0].strip() not in taken for word in ("--set", each)]
    words += ["--device", device] if device != "cuda" else []
    command = ["flame-train", "train", source, *words, "--continue-from", str(run), "-o", str(free)]
    return f"\nto go on from it with these settings: {shlex.join(command)}"


def _other_layers(plan: Plan, shapes: dict[str, tuple[int, ...]]) -> str:
    """How the matrices of a checkpoint are those of other layers; empty if they are not."""
    wanted = set(plan.checked.targets)
    layers = {name: next((n for n in _prefixes(name) if n in wanted), "") for name in shapes}
    strange = [name for name, layer in layers.items() if not layer]
    missing = [name for name in plan.checked.targets if name not in set(layers.values())]
    if strange:
        return f"  it adapts layers that lora.targets leave out, such as that of {strange[0]}"
    if missing:
        return f"  it has nothing for {counted(len(missing), 'layer')} that lora.targets choose, such as {missing[0]}"
    if (there := sum(math.prod(shape) for shape in shapes.values())) != plan.parameters:
        return f"  it has {there:,} trained values, and this config {plan.parameters:,}: another base model"
    return ""


def _prefixes(name: str) -> list[str]:
    """Every name that a dotted name begins with, the longest first."""
    return [*itertools.accumulate(name.split("."), "{}.{}".format)][::-1]


def _lora_of(found: Found) -> Path:
    """The LoRA's file in a checkpoint."""
    files = sorted(found.path.glob("*.safetensors"))
    return next(path for path in files if path.name != "optimizer.safetensors")


def run_folder(plan: Plan, group: ProcessGroup = ALONE) -> RunFolder:
    """The folder of a plan's run, not opened."""

    def refusal(old: str, found: Found | None) -> str | None:
        same_batches = found is not None and micro_batches_of(found) == plan.config.gradient.accumulation * group.world
        moved = found is None or knows_sources(found)
        return differences(old, plan.config, moved=moved, shared_out=same_batches)

    return RunFolder(Path(plan.config.output.dir), resolved(plan.config), refusal, plan.config.output.name)


def preflighted(plan: Plan, folder: RunFolder) -> Found | None:
    """The checkpoint to continue from; this writes no file. Raises OutputError if the run could not go on here."""
    found, c = folder.inspect(), plan.config
    could_cache(plan.encoding.folder)
    if found is not None and found.step > c.train.steps:
        raise OutputError(
            f"{folder.folder}: its run is at step {found.step}, beyond train.steps = {c.train.steps}; set train.steps "
            f"to {found.step} or more, or output.dir to another folder; LoRAs of earlier steps: {folder.checkpoints}"
        )
    if found is None or found.step < c.train.steps:
        kept = (c.checkpoint.keep or STATES) + (c.validation.repeats and bool(plan.held_out.rows))
        new = kept + 1 - min(kept, count(folder.checkpoints))
        arrays = 4 + (c.train.ema_decay > 0)  # values, once more as the LoRA, two moments, and their average
        preflight(folder.folder, plan.parameters * 4 * arrays * new)
    return found


def resume(plan: Plan, keys: Keys, folder: RunFolder, sources: Sources) -> Found | None:
    """The checkpoint to continue from, the log cut back to it. It may be newer than the one that was checked."""
    found = folder.resume()
    if found is not None:
        for reason in found.skipped:
            _LOG.warning("a newer checkpoint is damaged and was passed over: %s", reason)
        check_sources(found, sources, partial(changed_images, plan, keys, folder))
        _LOG.info("continuing after step %d from %s", found.step, found.path)
    return found
