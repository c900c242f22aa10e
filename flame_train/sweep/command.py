"""`flame-train sweep`: trains the runs of a sweep that are not done, here, by Slurm or by Ray, and shows all."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flame_train.config.render import flat
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.files import make_folder
from flame_train.errors import ConfigError
from flame_train.run.plan.encoding import ENCODED
from flame_train.training.stop import StopRequest

from .here import run_here, why
from .on_ray import run_on_ray
from .on_slurm import SCRIPT, script
from .plan import Planned, Sweep, read_sweep
from .states import is_done, table

_LOG = logging.getLogger(__name__)

Where = Literal["here", "slurm", "ray"]


def sweep(file: Path, where: Where, devices: Sequence[str], status: bool) -> tuple[dict[str, Any], int]:
    """Trains what is not done; with `status` it only looks.

    Args:
        file: the sweep's file.
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
            _LOG.error("%s: ended with %d %s", run.name, failed[run.name], why(run))
    return _report(all_runs), next(iter(failed.values()), 0)


def one_of(file: Path, number: int) -> tuple[str, tuple[str, ...]]:
    """The config and the overrides of one run by its number, from 0. Raises ConfigError if there is none."""
    found = read_sweep(file)
    if not 0 <= number < len(found.runs):
        raise ConfigError(f"--only: expected a number from 0 to {len(found.runs) - 1}, got {number}")
    return found.config, found.runs[number].overrides


def _report(all_runs: Sweep) -> dict[str, Any]:
    rows = table(all_runs)
    done = sum(is_done(run) for run in all_runs.runs)
    compared = {"compare": f"flame-train show {shlex.quote(str(all_runs.folder))}"} if done > 1 else {}
    return {"folder": str(all_runs.folder), "done": f"{done} of {len(rows)}", "runs": rows, **compared}


def _encode(all_runs: Sweep, runs: Sequence[Planned], device: str, stop: StopRequest) -> None:
    """Encodes images and captions once for all runs that share them, before several would at once.

    What fails here fails in the run that it belongs to as well, which says why.
    """
    seen = set[str]()
    for run in runs:
        asked = repr([(path, value) for path, value in flat(run.config).items() if path.startswith(ENCODED)])
        if asked in seen or stop.requested:
            continue
        seen.add(asked)
        if len(runs) > 1:
            settings = [part for each in run.overrides for part in ("--set", each)]
            command = [sys.executable, "-m", "flame_train", "cache", "--config", all_runs.config, "--device", device]
            done = subprocess.run([*command, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
            if done.returncode:
                _LOG.warning("%s: its images and captions could not be encoded ahead of training", run.name)
