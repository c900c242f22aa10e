"""A small run, killed at each call by which it touches a file, one run a call, and each continued to the same bytes.

Calls of libc are counted (`interpose.c`), those that open, change, sync, lock, rename or remove what lies below the
run's folder: its images and cache, its checkpoints and results. The kill comes before the call.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

import interpose
from forked import command, done
from kills import left_behind, prepare, result, train

from flame_train import cli

KILLED = -signal.SIGKILL
KEYS = ["--set", "train.steps=4", "--set", "checkpoint.keep=1"]  # two checkpoints, of which one goes


def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
    """Each call, however long that takes. Returns how often what happened, and what did not hold."""
    folder /= "a"  # what is touched is counted below here
    prepare(folder)
    done(train(folder, *KEYS))
    expected, count = result(folder), calls_of(folder, *KEYS)
    outcomes, failures = Counter[str](), []
    for at in range(1, count + 1):
        again(folder)
        killed = command(train(folder, *KEYS), lambda at=at: interpose.arm(folder, at, signal.SIGKILL))  # type: ignore[misc]
        outcomes["killed" if killed.code == KILLED else "not killed"] += 1
        continued = command(train(folder, *KEYS))
        if continued.code:
            failures.append(f"killed at call {at}, then ended with {continued.code}: {continued.said[-300:]}")
        elif result(folder) != expected:
            failures.append(f"killed at call {at}, then ended in other bytes")
        failures += [f"killed at call {at}: {name} was left behind" for name in left_behind(folder)]
    return outcomes, failures


def calls_of(folder: Path, *keys: str) -> int:
    """How many calls a run from nothing makes, with these keys of the config set."""
    again(folder)
    with tempfile.NamedTemporaryFile() as told:
        done(lambda: counted(train(folder, *keys), folder, Path(told.name)))
        return int(told.read())


def counted(line: list[str], folder: Path, told: Path) -> None:
    """Runs a command line, and writes down how many calls that took."""
    interpose.arm(folder, 0, 0)
    code = cli.run(line)
    if code:
        raise RuntimeError(f"the run ended with {code}")
    told.write_text(str(interpose.calls()))


def again(folder: Path) -> None:
    """As before the first run: nothing cached, no run folder."""
    for path in (folder / "run", folder / "images" / ".flame-cache"):
        shutil.rmtree(path, ignore_errors=True)
