"""How the runs of a sweep are started: here, one a device; by the script of a Slurm array; as Ray's tasks."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from flame_train.errors import ConfigError, DeviceFault, EnvironmentFault, exit_status, lines_shown, shown
from flame_train.io.run_output import output_of, saying
from flame_train.training.session import StopRequest

from .sweep_file import Planned, Sweep

_LOG = logging.getLogger(__name__)

_POLL: Final = 0.1  # seconds between two looks at the processes


@dataclass(frozen=True, slots=True)
class Started:
    """A run's process, and its device."""

    run: Planned
    device: str
    process: subprocess.Popen[bytes]


def arguments(config: str, run: Planned, device: str) -> list[str]:
    """Returns the arguments of `flame-train` for a run."""
    return ["train", "--config", config, "--device", device, *(x for each in run.overrides for x in ("--set", each))]


def run_here(
    config: str, runs: Sequence[Planned], devices: Sequence[str], stop: StopRequest, say: Callable[[str], None]
) -> dict[str, int]:
    """Trains all runs, one at a time on each device. A run that fails ends no other.

    Args:
        config: the config that they have in common.
        devices: each has one run at a time; a device may be named several times.
        stop: after a signal every run is asked to save and stop, and no other begins.
        say: gets a line for each run that begins or ends.

    Returns:
        Each run's exit code by its name; of runs that did not begin none.
    """
    waiting, free = list(runs), list(devices)
    started, codes = list[Started](), dict[str, int]()
    stopping = False
    while started or (waiting and not stop.requested):
        while waiting and free and not stop.requested:
            run, device = waiting.pop(0), free.pop(0)
            started.append(Started(run, device, _start(config, run, device)))
            say(f"{run.name}: started on {device}")
        if stop.requested and not stopping:
            stopping = True
            for each in started:
                each.process.send_signal(signal.SIGTERM)
        for each in [each for each in started if each.process.poll() is not None]:
            started.remove(each)
            free.append(each.device)
            code = each.process.returncode
            codes[each.run.name] = code if code >= 0 else 128 - code
            say(f"{each.run.name}: {'done' if code == 0 else f'ended with {codes[each.run.name]}'}")
        time.sleep(_POLL)
    return codes


def _start(config: str, run: Planned, device: str) -> subprocess.Popen[bytes]:
    """Begins a run, in a session of its own: a terminal's Ctrl-C comes here alone, and is passed on once."""
    command = [sys.executable, "-m", "flame_train", *arguments(config, run, device)]
    with saying(output_of(run.folder)) as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


TRIES: Final = 5
"""How often a run is begun again after its worker died; each time it goes on from its last checkpoint."""


def run_on_ray(
    config: str, runs: Sequence[Planned], device: str, folder: str, say: Callable[[str], None]
) -> dict[str, int]:
    """Trains all runs, each a task with a GPU, or on the CPU with a core; returns each run's exit code by its name.

    The cluster is that of RAY_ADDRESS; without it Ray starts one on this machine. Nodes see the same files, or the
    config has `output.remote` and addresses.

    Args:
        config: the config that they have in common.
        folder: the folder in which paths of the config begin.
        say: gets a line for each run that ends.

    Raises:
        EnvironmentFault: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise EnvironmentFault("Ray is not installed; install it with: pip install 'flame-train[ray]'") from None
    started_here, library = not ray.is_initialized(), cast(Any, ray)
    if started_here:
        library.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
    try:
        wants = {"num_gpus": 1} if device.startswith("cuda") else {"num_cpus": 1}
        task = library.remote(max_retries=TRIES, max_calls=1, **wants)(_train)
        waiting = {
            task.remote(config, run.overrides, device, folder, str(output_of(run.folder).absolute())): run
            for run in runs
        }
        codes = dict[str, int]()
        while waiting:
            (ended, *_), _ = library.wait(list(waiting), num_returns=1)
            run = waiting.pop(ended)
            codes[run.name] = _code(library, ended)
            say(f"{run.name}: {'done' if codes[run.name] == 0 else f'ended with {codes[run.name]}'}")
        return codes
    finally:
        if started_here:
            library.shutdown()


def _train(config: str, overrides: Sequence[str], device: str, folder: str, output: str) -> int:
    """Trains one run in a worker's own process, so that it ends with it."""
    os.chdir(folder)
    from flame_train.run.commands.stages import train

    try:
        train(config, overrides, device, False)
    except Exception as error:
        with saying(Path(output)) as file:
            file.write(f"error: {lines_shown(str(error))}\n".encode())
        return exit_status(error)
    return 0


def _code(library: Any, task: Any) -> int:
    """Returns a task's exit code; that of a device failure where its workers died too often."""
    try:
        return int(library.get(task))
    except library.exceptions.RayError:
        return DeviceFault.exit_code


SCRIPT: Final = "sweep.sbatch"
_WARNING: Final = 60
"""Seconds before the end of a job's time at which Slurm sends SIGUSR1, on which a run saves and stops."""
_LINES: Final = """#!/bin/bash
# Written by `flame-train sweep`: each task of the array trains one run, and continues it if it is started again.
{options}
cd {folder} || exit 1
srun {python} -m flame_train sweep {file} --only "$SLURM_ARRAY_TASK_ID" --device {device}
code=$?
# 138: SIGUSR1, the job's time was nearly over; the run saved a checkpoint and goes on in the job's next turn.
if [ "$code" -eq 138 ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


def directive(option: str) -> str:
    """Returns an option for sbatch as a line of the script. Raises ConfigError for one that would not end with its
    line.

    sbatch reads quotes and backslashes in it as a shell does.
    """
    if not option.isprintable():
        raise ConfigError(
            f"a line for Slurm: expected printable characters, got {shown(option)!r}; rename the sweep's file or its "
            "folder, or correct the option"
        )
    return f"#SBATCH {option}"


def script(sweep: Sweep, device: str) -> str:
    """Returns the text of the script. A GPU is asked for where the device is one, unless the sweep's own lines ask.

    Raises ConfigError for a name of which a line of options cannot be made.
    """
    folder = str(sweep.folder.absolute()).replace("%", "%%")
    options = [
        f"--job-name={shlex.quote(sweep.file.stem)}",
        f"--array=0-{len(sweep.runs) - 1}",
        "--requeue",
        "--open-mode=append",
        f"--signal=USR1@{_WARNING}",
        f"--output={shlex.quote(os.path.join(folder, 'slurm-%A_%a.txt'))}",
    ]
    if device.startswith("cuda") and not any(line.startswith(("--gpus", "--gres", "-G")) for line in sweep.slurm):
        options.append("--gpus=1")
    return _LINES.format(
        options="\n".join(map(directive, (*options, *sweep.slurm))),
        folder=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
        file=shlex.quote(str(sweep.file.absolute())),
        device=device,
    )
