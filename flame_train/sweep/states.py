"""The runs of a sweep as a table: what each has of its own, state, step and losses, as their folders say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from flame_train.config.render import flat
from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import OutputError
from flame_train.io import json_values as given
from flame_train.io.runstatus import state_of

from .plan import PLACES, Planned, Sweep

_TAIL: Final = 1 << 16
_MEAN_OF: Final = 50  # steps


def is_done(run: Planned) -> bool:
    """Whether the run has reached its last step."""
    status = _status(run)
    return status.get("state") == "done" and (given.whole(status.get("step")) or 0) >= run.config.train.steps


def table(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for each run, the one of the lowest validation loss first: what it has of its own, and how far it is."""
    own = _own_settings(sweep)
    rows = [_row(number, run, own) for number, run in enumerate(sweep.runs)]
    return sorted(rows, key=lambda row: (row["best_validation"] is None, row["best_validation"], row["number"]))


def _row(number: int, run: Planned, own: Mapping[str, str]) -> dict[str, Any]:
    status = _status(run)
    code, step = given.whole(status.get("exit_code")), str(given.whole(status.get("step")) or 0)
    state = given.text(status.get("state"), "pending")
    where = f"{given.text(status.get('host'))}, process {given.whole(status.get('pid'))}"
    values = flat(run.config)
    return {
        "number": number,
        "run": run.name,
        **{name: values.get(path, "") for path, name in own.items()},
        "state": f"{state}, {code}" if code else state,
        "step": step if run.config.train.epochs else f"{step}/{run.config.train.steps}",
        **_losses(run),
        "folder": where if state == "running" else str(run.folder),
    }


def _own_settings(sweep: Sweep) -> dict[str, str]:
    """The keys in which runs differ, by path, with the name of the column: that of the key where it is the only one."""
    paths = dict.fromkeys(each.partition("=")[0] for run in sweep.runs for each in run.overrides)
    values = [flat(run.config) for run in sweep.runs]
    differ = [
        path for path in paths if path not in PLACES and any(one.get(path) != values[0].get(path) for one in values)
    ]
    names = Counter(path.partition(".")[2] for path in differ)
    return {path: path if names[name := path.partition(".")[2]] > 1 else name for path in differ}


def _status(run: Planned) -> dict[str, Any]:
    try:
        return state_of(run.folder)
    except (OSError, OutputError):
        return {}


def _losses(run: Planned) -> dict[str, float | None]:
    """The lowest validation loss with its step, and the mean loss of the last steps, as the log has them."""
    try:
        with OpenFolder.open(run.folder) as folder:
            lines = folder.tail("log.jsonl", _TAIL).splitlines()
    except OSError:
        lines = []
    rows = [given.table(given.json_tree(line)) for line in lines]
    losses = [loss for row in rows[-_MEAN_OF:] if (loss := given.number(row.get("loss"))) is not None]
    bests = [given.table(given.table(row.get("validation")).get("best")) for row in rows if "validation" in row]
    best = bests[-1] if bests else {}
    return {
        "best_validation": given.number(best.get("loss")),
        "at_step": given.whole(best.get("step")),
        "mean_loss": sum(losses) / len(losses) if losses else None,
    }
