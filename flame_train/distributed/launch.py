"""`--gpus N`: short for `mpirun -n N` of the same command or script on this machine.

Open MPI answers SIGTERM and SIGINT with SIGKILL to all processes a quarter of a second later, which no option changes.
SIGUSR1 it passes on. So this process stays beside it, and hands the signals that stop a run on as that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flame_train.errors import STOPPING, ConfigError, EnvironmentFault

from .join import read_rank_info

_WARNING: Final = STOPPING[-1]  # SIGUSR1, which Open MPI passes on
_PR_SET_PDEATHSIG: Final = 1  # of Linux's prctl


def start_again(processes: int) -> None:
    """Starts the running script anew in so many processes, and ends with their exit status. Within these it returns.

    Raises:
        EnvironmentFault: there is no mpirun.
        ConfigError: no script runs, or a launcher started another number of processes.
    """
    world = read_rank_info(os.environ).world
    if world == processes:
        return
    if world > 1:
        raise ConfigError(f"gpus = {processes}: a launcher started {world} processes; leave it out")
    at_once = "-c" in sys.orig_argv[1:]
    if "ipykernel" in sys.modules or not (at_once or getattr(sys.modules["__main__"], "__file__", None)):
        raise ConfigError(f"gpus = {processes}: it starts the script anew, and none runs here; write this into a file")
    sys.exit(start(processes, sys.orig_argv[1:]))


def start_command(processes: int) -> int:
    """Runs the command line of this process in so many, without `--gpus`; as `start`."""
    return start(processes, ["-m", "flame_train", *without_gpus(sys.argv[1:])])


def start(processes: int, arguments: Sequence[str]) -> int:
    """Runs `mpirun`: its exit status, or 128 + the number of the signal that stopped the run.

    Args:
        arguments: of Python: a module or script, and what follows it.

    Raises:
        EnvironmentFault: there is no mpirun.
        ConfigError: a launcher started this process.
    """
    if read_rank_info(os.environ).world > 1:
        raise ConfigError("--gpus starts the processes itself; leave it out where mpirun, srun or torchrun does")
    mpirun = shutil.which(
        "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if mpirun is None:
        raise EnvironmentFault("--gpus needs mpirun, which is not there; pip install 'flame-train[multi]'")
    command = command_of(mpirun, processes, arguments, _is_open_mpi(mpirun), getattr(os, "geteuid", int)() == 0)
    return watched(command)


def watched(command: Sequence[str]) -> int:
    """Returns the exit status of a launcher, to which signals that would stop this process are handed on as SIGUSR1."""
    signals: list[int] = []
    launched: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, frame: object) -> None:
        signals.append(number)
        for process in launched:
            process.send_signal(_WARNING)

    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    # In a session of its own, or Ctrl-C in a terminal would reach it too.
    launched.append(subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent))
    if signals:  # meanwhile
        launched[0].send_signal(_WARNING)
    status = launched[0].wait()
    if signals and status in (128 + _WARNING, -_WARNING):
        return 128 + signals[0]
    return 128 - status if status < 0 else status


def _end_with_parent() -> None:
    """Has Linux send SIGTERM to the calling process when its parent has died, even by SIGKILL."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def command_of(mpirun: str, processes: int, arguments: Sequence[str], open_mpi: bool, as_root: bool) -> list[str]:
    """Returns the command line: the program and its arguments.

    Open MPI binds each process to a core and has no more of them than cores, unless told so; and refuses root.

    Args:
        mpirun: the launcher's file.
        arguments: of Python.
        open_mpi: whether the launcher is Open MPI's.
        as_root: whether root starts it.
    """
    ours = ["--bind-to", "none", "--oversubscribe"] if open_mpi else []
    root = ["--allow-run-as-root"] if open_mpi and as_root else []
    return [mpirun, "-n", str(processes), *ours, *root, sys.executable, *arguments]


def without_gpus(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without `--gpus N` or `--gpus=N`."""
    remaining, following = [], False
    for argument in arguments:
        if following or argument.startswith("--gpus="):
            following = False
        elif argument == "--gpus":
            following = True
        else:
            remaining.append(argument)
    return remaining


def _is_open_mpi(mpirun: str) -> bool:
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "open mpi" in (version.stdout + version.stderr).lower()
