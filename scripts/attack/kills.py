"""A small run, killed at random times as often as it takes to end: its result must be that of a run left alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from flame_train.io.commit import newest
from flame_train.io.runstatus import state_of
from flame_train.models.common.small import SMALL_SDXL
from flame_train.quickstart.drawings import write_images

CONFIG = """
[model]
checkpoint = "{base}"
[data]
path = "{folder}/images"
resolution = 64
bucket_step = 32
[lora]
rank = 2
[train]
steps = 6
precision = "fp32"
[checkpoint]
every = 2
[output]
dir = "{folder}/run"
"""


def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
    """Runs until `end` on the clock. Returns how often what happened, and what did not hold."""
    whole = folder / "whole"
    prepare(whole)
    begin = time.monotonic()
    run(whole, None)
    seconds = time.monotonic() - begin
    expected = result(whole)
    outcomes, failures = Counter[str](), []
    while time.monotonic() < end:
        killed = folder / "killed"
        shutil.rmtree(killed, ignore_errors=True)
        prepare(killed)
        while run(killed, rng.uniform(0.0, 1.2 * seconds)) < 0:
            outcomes["killed"] += 1
            if (killed / "run").exists() and state_of(killed / "run").get("state") == "running":
                failures.append("a run that was killed is said to run")
        outcomes["ended"] += 1
        if result(killed) != expected:
            failures.append("a run that was killed ended in other bytes")
        failures += [f"{name} was left behind" for name in left_behind(killed)]
    return outcomes, failures


def prepare(folder: Path) -> None:
    """A config, images and nothing else."""
    write_images(folder / "images", 4, 1)
    (folder / "config.toml").write_text(CONFIG.format(base=SMALL_SDXL, folder=folder))


def train(folder: Path, *more: str) -> list[str]:
    """The command that starts or continues the run."""
    return ["train", "--config", str(folder / "config.toml"), "--device", "cpu", *more]


def run(folder: Path, kill_after: float | None) -> int:
    """The exit code; negative if it was killed."""
    line = [sys.executable, "-m", "flame_train", *train(folder)]
    quiet = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=quiet) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(kill_after)
        process.kill()
        said = process.stderr.read() if process.stderr else ""
    if process.returncode > 0:
        raise RuntimeError(f"the run ended with {process.returncode}: {said}")
    return process.returncode


def left_behind(folder: Path) -> list[str]:
    """Names of what a killed process left half-written."""
    return [path.name for path in folder.rglob(".*") if path.is_file() and path.name != ".lock"]


def result(folder: Path) -> dict[str, str]:
    """Hashes of what must not depend on how a run came to its end."""
    found = newest(folder / "run" / "checkpoints")
    assert found is not None, "a run that ended has a checkpoint"
    files = [folder / "run" / "lora.safetensors", *sorted(found.path.iterdir())]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
