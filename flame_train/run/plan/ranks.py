"""What several processes must agree on before they train, and what each does of an update's micro-batches."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from flame_train.config.keys import keys
from flame_train.config.render import flat, toml_value
from flame_train.config.schema import Config
from flame_train.distributed.group import ProcessGroup
from flame_train.errors import ConfigError, OutputError
from flame_train.io.addresses import is_address
from flame_train.io.commit import Checkpoint
from flame_train.run.plan.plan import Plan
from flame_train.training.result import micro_batches_of
from flame_train.version import __version__

_SHARED: Final = ("output.dir", "data.cache")
_BEGIN: Final = 1 << 20  # bytes of a file that are compared; what training depends on is compared whole later
_LOG = logging.getLogger(__name__)


def refuse_other_settings(group: ProcessGroup, config: Config) -> None:
    """Raises ConfigError, in all processes, if one has other settings or another version than rank 0.

    All settings count: those that change no weight may decide when processes meet. Files and folders are the same where
    what lies there is, however it is called.
    """
    if group.world == 1:
        return
    mine = {"flame-train's version": __version__}
    for path, value in flat(config).items():
        mine[path] = toml_value(keys()[path].with_places(value, partial(_place, path in _SHARED)))
    _require_same_plan(group, mine)


def refuse_other_files(group: ProcessGroup, sources: Mapping[str, str]) -> None:
    """Raises ConfigError, in all processes, if one reads other images, captions or models than rank 0."""
    _require_same_plan(group, {f"the files of {name}": digest for name, digest in sources.items()})


def _place(shared: bool, path: str) -> str:
    """Returns a file or folder as a process sees it: a folder that all write to by its number on its disk."""
    try:
        status = None if is_address(path) else os.stat(path)
        if status is None:
            return path
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                begin = hashlib.sha256(file.read(_BEGIN)).hexdigest()
            return f"a file of {status.st_size} bytes, {begin[:16]}"
        if shared:
            return f"folder {status.st_ino}"
        return f"a folder with {hashlib.sha256(os.fsencode(chr(10).join(sorted(os.listdir(path))))).hexdigest()[:16]}"
    except (OSError, ValueError):
        return path


def _require_same_plan(group: ProcessGroup, mine: Mapping[str, str]) -> None:
    lead, *others = [json.loads(text) for text in group.all_gather(json.dumps(mine))]
    lines = [
        f"  rank {rank}: {name}: {other.get(name)}, rank 0 has {lead.get(name)}"
        for rank, other in enumerate(others, 1)
        for name in {**lead, **other}
        if other.get(name) != lead.get(name)
    ]
    if lines:
        with group.barrier():
            raise ConfigError(
                "all processes train the same run, but these differ:\n" + "\n".join(lines) + "\n"
                "start all of them with the same config, files and version"
            )


def refuse_other_checkpoint(group: ProcessGroup, checkpoint: Checkpoint | None) -> None:
    """Raises OutputError, in all processes, if one would continue from another step than rank 0."""
    steps = group.all_gather("anew" if checkpoint is None else f"after step {checkpoint.step}")
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        with group.barrier():
            raise OutputError(
                f"rank {other} would begin {steps[other]}, rank 0 {steps[0]}; give all processes the same output.dir "
                "and train.continue_from, on a disk that their machines share"
            )


def split_micro_batches(plan: Plan, checkpoint: Checkpoint | None, group: ProcessGroup) -> Plan:
    """Returns the plan of one process. An update of a run that is continued takes as many micro-batches as it began
    with.

    Raises:
        OutputError: the processes cannot share that number evenly.
    """
    accumulation = plan.config.gradient.accumulation
    total = (micro_batches_of(checkpoint) if checkpoint else None) or accumulation * group.world
    each, rest = divmod(total, group.world)
    if rest:
        raise OutputError(
            f"{plan.config.output.dir}: an update of its run takes {total} micro-batches (gradient.accumulation times "
            f"processes), which {group.world} processes cannot share; start a number of them that divides {total}"
        )
    if each == accumulation:
        return plan
    _LOG.info(
        "an update takes %d micro-batches, as the run began: %d for each of %d processes", total, each, group.world
    )
    gradient = plan.config.gradient.model_copy(update={"accumulation": each})
    return replace(plan, checked=replace(plan.checked, config=plan.config.model_copy(update={"gradient": gradient})))
