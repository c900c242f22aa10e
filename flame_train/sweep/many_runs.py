"""`flame-train sweep`: trains the runs of a sweep that are not done, here, by Slurm or by Ray, and shows all."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from flame_train.config.render import flat
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import make_folder
from flame_train.errors import ConfigError, OutputError
from flame_train.io import json_values as given
from flame_train.io.run_output import why
from flame_train.io.runlog import state_of
from flame_train.run.plan.encoding import ENCODED
from flame_train.training.session import StopRequest

from .runners import SCRIPT, run_here, run_on_ray, script
from .sweep_file import PLACES, Planned, Sweep, read_sweep

_LOG = logging.getLogger(__name__)

Where = Literal["here", "slurm", "ray"]


def sweep(file: Path, where: Where, devices: Sequence[str], status: bool) -> tuple[dict[str, Any], int]:
    """Trains what is not done; with `status` it only looks.

    Args:
        where: where the runs run. For Slurm a script is written, and nothing is started.
        devices: here, each of which has one run at a time; elsewhere the first, for every run.
        status: whether nothing is started or written.

    Returns:
        The table of all runs, for the report, and the exit code: that of the first run that failed.
    """
    all_runs = read_sweep(file)
    if status:
        return _report(all_runs), 0
    make_folder(all_runs.folder)
    if where == "slurm":
        path = all_runs.folder / SCRIPT
        raw = os.fsencode(script(all_runs, devices[0]))
        write_atomically(path, [raw], len(raw))
        return {"script": str(path), "start": f"sbatch {shlex.quote(str(path))}", "runs": len(all_runs.runs)}, 0
    open_runs = [run for run in all_runs.runs if not is_done(run)]
    with StopRequest() as stop:
        _encode(all_runs, open_runs, devices[0], stop)
        if where == "ray":
            codes = run_on_ray(os.path.abspath(all_runs.config), open_runs, devices[0], os.getcwd(), _LOG.info)
        else:
            codes = run_here(all_runs.config, open_runs, devices, stop, _LOG.info)
            stop.check(f"in a sweep; start the same command again to go on with {all_runs.folder}")
    failed = {name: code for name, code in codes.items() if code}
    for run in open_runs:
        if run.name in failed:
            _LOG.error("%s: ended with %d %s", run.name, failed[run.name], why(run.folder))
    return _report(all_runs), next(iter(failed.values()), 0)


def one_of(file: Path, number: int) -> tuple[str, tuple[str, ...]]:
    """Returns the config and the overrides of one run by its number, from 0. Raises ConfigError if there is none."""
    runs_of = read_sweep(file)
    if not 0 <= number < len(runs_of.runs):
        raise ConfigError(f"--only: expected a number from 0 to {len(runs_of.runs) - 1}, got {number}")
    return runs_of.config, runs_of.runs[number].overrides


def _report(all_runs: Sweep) -> dict[str, Any]:
    rows = table(all_runs)
    done = sum(is_done(run) for run in all_runs.runs)
    compared = {"compare": f"flame-train show {shlex.quote(str(all_runs.folder))}"} if done > 1 else {}
    return {"folder": str(all_runs.folder), "done": f"{done} of {len(rows)}", "runs": rows, **compared}


def _encode(all_runs: Sweep, runs: Sequence[Planned], device: str, stop: StopRequest) -> None:
    """Encodes once for all runs that share it; what fails here fails in the run that it belongs to as well."""
    encoded = set[str]()
    for run in runs:
        settings_read = repr([(path, value) for path, value in flat(run.config).items() if path.startswith(ENCODED)])
        if settings_read in encoded or stop.requested:
            continue
        encoded.add(settings_read)
        if len(runs) > 1:
            settings = [part for each in run.overrides for part in ("--set", each)]
            command = [sys.executable, "-m", "flame_train", "cache", "--config", all_runs.config, "--device", device]
            done = subprocess.run([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
            if done.returncode:
                _LOG.warning("%s: its images and captions could not be encoded ahead of training", run.name)


_TAIL: Final = 1 << 16
_MEAN_OF: Final = 50  # steps


def is_done(run: Planned) -> bool:
    """Tells whether the run has reached its last step."""
    status = _status(run)
    return status.get("state") == "done" and (given.whole(status.get("step")) or 0) >= run.config.train.steps


def table(sweep: Sweep) -> list[dict[str, Any]]:
    """Makes a row for each run, the one of the lowest validation loss first: its own settings, and how far it is."""
    columns = _own_settings(sweep)
    rows = [_row(number, run, columns) for number, run in enumerate(sweep.runs)]
    return sorted(rows, key=lambda row: (row["best_validation"] is None, row["best_validation"], row["number"]))


def _row(number: int, run: Planned, columns: Mapping[str, str]) -> dict[str, Any]:
    status = _status(run)
    code, step = given.whole(status.get("exit_code")), str(given.whole(status.get("step")) or 0)
    state = given.text(status.get("state"), "pending")
    where = f"{given.text(status.get('host'))}, process {given.whole(status.get('pid'))}"
    values = flat(run.config)
    return {
        "number": number,
        "run": run.name,
        **{name: values.get(path, "") for path, name in columns.items()},
        "state": f"{state}, {code}" if code else state,
        "step": step if run.config.train.epochs else f"{step}/{run.config.train.steps}",
        **_losses(run),
        "folder": where if state == "running" else str(run.folder),
    }


def _own_settings(sweep: Sweep) -> dict[str, str]:
    """Finds the keys in which runs differ, by path, with the name of the column: the key's where it is unique."""
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
    """Reads the lowest validation loss with its step, and the mean loss of the last steps, from the log."""
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
