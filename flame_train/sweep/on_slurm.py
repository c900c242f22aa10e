"""A sweep as a Slurm array: a script that can be read before it is submitted, a task for each run."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Final

from flame_train.errors import ConfigError, shown

from .sweep_file import Sweep

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
