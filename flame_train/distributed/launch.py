"""`--gpus N`: short for `mpirun -n N` of the same command on this machine, and nothing more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flame_train.errors import ConfigError, EnvironmentFault

from .environment import read_place


def start(processes: int, arguments: Sequence[str]) -> NoReturn:
    """Becomes `mpirun`. Raises EnvironmentFault without one, ConfigError in a process that a launcher started."""
    if read_place(os.environ).world > 1:
        raise ConfigError("--gpus starts the processes itself; leave it out where mpirun, srun or torchrun does")
    mpirun = shutil.which(
        "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if mpirun is None:
        raise EnvironmentFault("--gpus needs mpirun, which is not there; pip install 'flame-train[multi]'")
    command = command_of(mpirun, processes, arguments, _is_open_mpi(mpirun), getattr(os, "geteuid", int)() == 0)
    os.execv(mpirun, command)


def command_of(mpirun: str, processes: int, arguments: Sequence[str], open_mpi: bool, as_root: bool) -> list[str]:
    """The command line.

    Open MPI binds each process to a core and has no more of them than cores, unless told so; and refuses root.

    Args:
        mpirun: the launcher's file.
        processes: how many it starts.
        arguments: of `flame-train`; --gpus is left out.
        open_mpi: whether the launcher is Open MPI's.
        as_root: whether root starts it.

    Returns:
        The program and its arguments.
    """
    ours = ["--bind-to", "none", "--oversubscribe"] if open_mpi else []
    root = ["--allow-run-as-root"] if open_mpi and as_root else []
    return [mpirun, "-n", str(processes), *ours, *root, sys.executable, "-m", "flame_train", *without_gpus(arguments)]


def without_gpus(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--gpus N` or `--gpus=N`."""
    left, following = [], False
    for argument in arguments:
        if following or argument.startswith("--gpus="):
            following = False
        elif argument == "--gpus":
            following = True
        else:
            left.append(argument)
    return left


def _is_open_mpi(mpirun: str) -> bool:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "open mpi" in (said.stdout + said.stderr).lower()
