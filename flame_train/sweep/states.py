"""The runs of a sweep as a table: state, step, loss and place, as their folders say."""

from __future__ import annotations

from typing import Any, Final

from flame_train import given
from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import OutputError
from flame_train.io.runstatus import state_of

from .plan import Planned, Sweep

_TAIL: Final = 1 << 16
_MEAN_OF: Final = 50  # steps


def is_done(run: Planned) -> bool:
    """Whether the run has reached its last step."""
    status = _status(run)
    return status.get("state") == "done" and (given.whole(status.get("step")) or 0) >= run.config.train.steps


def table(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for each run: its name, state, steps, mean loss of the last ones, where it runs, and its folder."""
    rows = []
    for number, run in enumerate(sweep.runs):
        status = _status(run)
        code, step = given.whole(status.get("exit_code")), str(given.whole(status.get("step")) or 0)
        state = given.text(status.get("state"), "not begun")
        where = f"{given.text(status.get('host'))}, process {given.whole(status.get('pid'))}"
        rows.append(
            {
                "number": number,
                "run": run.name,
                "state": f"{state}, {code}" if code else state,
                "step": step if run.config.train.epochs else f"{step}/{run.config.train.steps}",
                "loss": _loss(run),
                "place": where if state == "running" else str(run.folder),
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
        with OpenFolder.open(run.folder) as folder:
            lines = folder.tail("log.jsonl", _TAIL).splitlines()[-_MEAN_OF:]
    except OSError:
        return ""
    read = (given.number(given.table(given.json_tree(line)).get("loss")) for line in lines)
    losses = [loss for loss in read if loss is not None]
    return round(sum(losses) / len(losses), 5) if losses else ""
