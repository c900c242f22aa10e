"""Power cuts: a small run on a disk of its own, which is cut off at a call by which the run touches a file.

The disk is an ext4 file system in a file. Where the run is stopped, that file is copied: it holds what the kernel had
sent to the disk by then, and nothing of what only lay in memory. The run is killed, the copy is mounted in the disk's
place, and the run is started again. It must end in the same bytes, and what its status said to be saved must be there.
A disk that loses what it has acknowledged is not simulated. Needs Linux, root, `mkfs.ext4` and loop devices.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import interpose
from calls import KEYS, again, calls_of
from forked import Child, command, done
from kills import prepare, result, train

from flame_train.io.commit import newest
from flame_train.io.runstatus import state_of

MODES = ("ordered", "writeback", "journal")
"""How ext4 orders a file's data and the journal (`data=` of mount)."""

CUTS = 20
"""A mode."""

_SIZE = 64 << 20  # bytes of the disk


def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
    """So many cuts in each mode, however long that takes. Returns how often what happened, and what did not hold."""
    outcomes, failures = Counter[str](), []
    begun, disk, place = folder / "begun.img", folder / "disk.img", folder / "disk"
    place.mkdir()
    with begun.open("wb") as file:
        file.truncate(_SIZE)
    subprocess.run(["mkfs.ext4", "-q", begun], check=True)
    with mounted(begun, place, MODES[0]):
        prepare(place / "a")
    shutil.copyfile(begun, disk)
    with mounted(disk, place, MODES[0]):
        work = place / "a"
        count = calls_of(work, *KEYS)
        again(work)
        done(train(work, *KEYS))
        expected = result(work) | images(work)
    for mode in MODES:
        for _ in range(CUTS):
            shutil.copyfile(begun, disk)
            at = rng.randint(1, count)
            fault = cut(disk, place, mode, at, expected)
            outcomes[f"cut off with data={mode}"] += 1
            failures += [f"data={mode}, cut off at call {at}: {fault}"] if fault else []
    return outcomes, failures


def cut(disk: Path, place: Path, mode: str, at: int, expected: dict[str, str]) -> str:
    """One cut, and what did not hold; "" if all did."""
    work, copy = place / "a", disk.with_suffix(".cut")
    with mounted(disk, place, mode):
        child = Child(train(work, *KEYS), lambda: interpose.arm(work, at, signal.SIGSTOP))
        stopped = child.stops()
        copy_whole(disk, copy)
        said = child.kill() if stopped else child.end()
    if not stopped:
        return f"the run was not stopped, and ended with {said.code}: {said.said[-300:]}"
    with mounted(copy, place, mode):
        if fault := lost(work / "run"):
            return fault
        continued = command(train(work, *KEYS))
        if continued.code:
            return f"started again, it ended with {continued.code}: {continued.said[-300:]}"
        return "" if result(work) | images(work) == expected else "it ended in other bytes"


def lost(run: Path) -> str:
    """What the status says is saved and is not there."""
    saved = state_of(run).get("saved", 0) if run.exists() else 0
    found = newest(run / "checkpoints") if saved else None
    return f"step {saved} was saved, and is lost" if saved > (found.step if found else 0) else ""


def copy_whole(disk: Path, copy: Path) -> None:
    """A copy of one moment: the disk may be written to meanwhile, so it is copied until two copies agree."""
    last = b""
    while True:
        shutil.copyfile(disk, copy)
        now = sha256(copy.read_bytes()).digest()
        if now == last:
            return
        last = now


def images(work: Path) -> dict[str, str]:
    """Hashes of the images and captions, which no cut may touch."""
    files = sorted(path for path in (work / "images").iterdir() if path.is_file())
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def mounted(disk: Path, place: Path, mode: str) -> Iterator[None]:
    """The disk, mounted at `place` meanwhile."""
    subprocess.run(["mount", "-o", f"loop,data={mode}", disk, place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)
