"""The runs of a sweep as a table: state, step, loss and place, as their folders say."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from flame_train.errors import OutputError
from flame_train.io.runstatus import state_of

from .plan import Planned, Sweep

_TAIL: Final = 1 << 16
_MEAN_OF: Final = 50  # steps


def is_done(run: Planned) -> bool:
    """Whether the run has reached its last step."""
    status = _status(run)
    return status.get("state") == "done" and int(status.get("step", 0)) >= run.config.train.steps


def table(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for each run: its name, state, steps, mean loss of the last ones, where it runs, and its folder."""
    rows = []
    for number, run in enumerate(sweep.runs):
        status = _status(run)
        code, step = status.get("exit_code"), str(status.get("step", 0))
        state = str(status.get("state", "not begun"))
        rows.append(
            {
                "number": number,
                "run": run.name,
                "state": f"{state}, {code}" if code else state,
                "step": step if run.config.train.epochs else f"{step}/{run.config.train.steps}",
                "loss": _loss(run),
                "place": f"{status['host']}, process {status['pid']}" if state == "running" else str(run.folder),
            }
        )
    return rows


def _status(run: Planned) -> dict[str, Any]:
    try:
        return state_of(run.folder)
    except (OSError, OutputError):
        return {}


def _loss(run: Planned) -> float | str:
    """The mean loss of the last steps in the log; nothing before the first."""
    try:
        with open(run.folder / "log.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().splitlines()[-_MEAN_OF:]
    except OSError:
        return ""
    losses = list[float]()
    for line in lines:
        try:
            losses.append(float(json.loads(line)["loss"]))
        except (ValueError, KeyError, TypeError):
            continue
    return round(sum(losses) / len(losses), 5) if losses else ""
