"""A sweep as a Slurm array: a script that can be read before it is submitted, a task for each run."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Final

from .plan import Sweep

SCRIPT: Final = "sweep.sbatch"
_WARNING: Final = 60
"""Seconds before the end of a job's time at which Slurm sends SIGUSR1, on which a run saves and stops."""
_LINES: Final = """#!/bin/bash
# Written by `flame-train sweep`: each task of the array trains one run, and continues it if it is started again.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@{warning}
#SBATCH --output={output}
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


def script(sweep: Sweep, device: str) -> str:
    """The text of the script. A GPU is asked for where the device is one, unless the sweep's own lines ask."""
    options = list(sweep.slurm)
    if device.startswith("cuda") and not any(line.startswith(("--gpus", "--gres", "-G")) for line in options):
        options.insert(0, "--gpus=1")
    return _LINES.format(
        name=sweep.file.stem,
        last=len(sweep.runs) - 1,
        warning=_WARNING,
        output=(sweep.folder / "slurm-%A_%a.txt").absolute(),
        options="\n".join(f"#SBATCH {line}" for line in options),
        folder=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
        file=shlex.quote(str(sweep.file.absolute())),
        device=device,
    )
