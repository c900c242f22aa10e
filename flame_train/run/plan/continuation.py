"""The run that `train.continue_from` names: its newest checkpoint, checked against the plan before anything loads.

Carried over are the LoRA in fp32, the state of the optimizer's rule with its count of updates, and a moving average.
What begins anew: the step, the schedule with its warm-up, the order of samples, the random numbers of a step, the loss
scale, the log. Every setting may differ but the optimizer's name and the sizes and scales of the adapters' matrices.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from itertools import accumulate, count
from pathlib import Path

from flame_train.config.resume import incompatible_settings
from flame_train.config.schema import Config
from flame_train.disk.files import reading
from flame_train.errors import ConfigError, OutputError, counted
from flame_train.io.commit import Found, newest
from flame_train.run.plan.plan import Plan
from flame_train.training.result import value_shapes


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
    free = next(place for n in count(2) if not (place := run.with_name(f"{run.name}-{n}")).exists())
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
    return [*accumulate(name.split("."), "{}.{}".format)][::-1]


def _lora_of(found: Found) -> Path:
    """The LoRA's file in a checkpoint."""
    files = sorted(found.path.glob("*.safetensors"))
    return next(path for path in files if path.name != "optimizer.safetensors")
