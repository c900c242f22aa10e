"""A run of some thousand steps: its memory and its open files do not grow."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from kills import prepare, train

STEPS = int(os.environ.get("ATTACK_SOAK_STEPS", "4000"))
KEYS = {"train.steps": STEPS, "checkpoint.every": 50, "checkpoint.keep": 2}
GROWTH = 1024  # bytes a step
_EVERY = 0.5  # seconds between two looks


def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
    """All steps, however long they take. Returns what was measured, and what did not hold."""
    prepare(folder)
    line = [sys.executable, "-m", "flame_train", *train(folder), *(f"--set={k}={v}" for k, v in KEYS.items())]
    log, said = folder / "run" / "log.jsonl", folder / "said"
    seen: list[tuple[int, int, int]] = []
    with said.open("wb") as file, subprocess.Popen(line, stdout=file, stderr=file) as process:
        while process.poll() is None:
            time.sleep(_EVERY)
            step = log.read_bytes().count(b"\n") if log.exists() else 0
            if step > STEPS // 10:  # by then all has been taken that is taken once
                seen += measured(process.pid, step)
    if process.returncode or len(seen) < 4:
        return Counter(steps=0), [f"ended with {process.returncode}, seen {len(seen)} times: {said.read_text()[-300:]}"]
    third = len(seen) // 3 or 1
    begin, close = seen[:third], seen[-third:]
    slope = (min(m for _, m, _ in close) - min(m for _, m, _ in begin)) / (close[0][0] - begin[0][0])
    failures = [f"memory grew by {slope:.0f} bytes a step"] if slope > GROWTH else []
    if max(files for *_, files in close) > max(files for *_, files in begin):
        failures.append("open files grew")
    outcomes = Counter(steps=STEPS)
    outcomes["KiB resident at a third"], outcomes["KiB at the end"] = begin[-1][1] >> 10, close[-1][1] >> 10
    return outcomes, failures


def measured(pid: int, step: int) -> list[tuple[int, int, int]]:
    """The step, resident bytes and open files of a process; nothing if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return [(step, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))]
    except OSError:
        return []
