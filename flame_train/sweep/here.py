"""Runs of a sweep on this machine: each a process of its own, one at a time on each GPU."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import disk_errors, make_folder
from flame_train.training.session import StopRequest

from .sweep_file import Planned

_LOG = logging.getLogger(__name__)

_POLL: Final = 0.1  # seconds between two looks at the processes
OUTPUT: Final = "output.txt"
"""What a run says, beside its folder: NAME.output.txt."""


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
    with saying(output_of(run)) as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)


def output_of(run: Planned) -> Path:
    """Returns the file with what a run said."""
    return run.folder.with_name(f"{run.folder.name}.{OUTPUT}")


@contextmanager
def saying(output: Path) -> Iterator[IO[bytes]]:
    """Opens the file with what a run says, to append to. Raises OutputError where it is a link, or no plain file."""
    make_folder(output.parent)
    with ExitStack() as opened:
        with disk_errors(output):
            folder = opened.enter_context(OpenFolder.open(output.parent))
            file = opened.enter_context(folder.appending(output.name))
        yield file


def why(run: Planned) -> str:
    """Returns the last error that a run said, as one line."""
    output = output_of(run)
    try:
        with OpenFolder.open(output.parent) as folder:
            lines = folder.tail(output.name, 1 << 14).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.startswith("error: ")), "")
