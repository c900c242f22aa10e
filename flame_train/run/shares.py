"""What several processes must agree on before they train, and what each does of an update's micro-batches."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace

from flame_train.config.render import decisive
from flame_train.config.schema import Config
from flame_train.distributed.group import ProcessGroup
from flame_train.errors import ConfigError, OutputError
from flame_train.io.commit import Found
from flame_train.training.result import micro_batches_of
from flame_train.version import __version__

from .plan import Plan

_LOG = logging.getLogger(__name__)


def refuse_unlike(group: ProcessGroup, config: Config, sources: Mapping[str, str]) -> None:
    """Raises ConfigError, in all processes, if one has other settings, files or another version than rank 0."""
    mine = {
        "flame-train's version": __version__,
        **{f"the files of {name}": digest for name, digest in sources.items()},
    }
    mine |= {path: json.dumps(value, default=str) for path, value in decisive(config).items()}
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


def refuse_other_checkpoint(group: ProcessGroup, found: Found | None) -> None:
    """Raises OutputError, in all processes, if one would continue from another step than rank 0."""
    steps = group.all_gather("anew" if found is None else f"after step {found.step}")
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        with group.barrier():
            raise OutputError(
                f"rank {other} would begin {steps[other]}, rank 0 {steps[0]}; give all processes the same output.dir "
                "and train.continue_from, on a disk that their machines share"
            )


def shared_out(plan: Plan, found: Found | None, group: ProcessGroup) -> Plan:
    """The plan of one process. An update of a run that is continued takes as many micro-batches as it began with.

    Raises:
        OutputError: the processes cannot share that number evenly.
    """
    own = plan.config.gradient.accumulation
    total = (micro_batches_of(found) if found else None) or own * group.world
    each, rest = divmod(total, group.world)
    if rest:
        raise OutputError(
            f"{plan.config.output.dir}: an update of its run takes {total} micro-batches (gradient.accumulation times "
            f"processes), which {group.world} processes cannot share; start a number of them that divides {total}"
        )
    if each == own:
        return plan
    _LOG.info(
        "an update takes %d micro-batches, as the run began: %d for each of %d processes", total, each, group.world
    )
    gradient = plan.config.gradient.model_copy(update={"accumulation": each})
    return replace(plan, checked=replace(plan.checked, config=plan.config.model_copy(update={"gradient": gradient})))
