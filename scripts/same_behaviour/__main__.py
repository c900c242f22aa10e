"""The behaviour of a checkout in one JSON file, and what differs between two of them: for a move of modules.

    nice python scripts/same_behaviour record BEFORE.json --work /dev/shm/behaviour
    PYTHONPATH=ANOTHER_CHECKOUT nice python scripts/same_behaviour record AFTER.json --work /dev/shm/behaviour
    python scripts/same_behaviour compare BEFORE.json AFTER.json

Recorded is the `flame_train` that Python imports. Both sides take the same `--work`: its small bases are made once, and
its path is part of each LoRA. Needs no GPU; two free cores take about a quarter of an hour a side. The parts:

    runs     every family x adapter kind x way to train, on the CPU: four steps, one stop. Hashes of all files, the log
    shapes   every family x adapter kind at published size on a described H100: launches, kernels, predicted memory
    words    `--help`, `init` and `import` of all families, and what is refused: exit codes and texts

`--only "runs/sdxl/*"` takes a glob over the cases. `record` adds to a file that is there; a case's new result replaces
its old one. `compare` exits with 1 where anything differs, or is in one file alone.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # before NumPy loads; a sum by two threads is another sum
    os.environ[_name] = "1"
os.environ |= {"NO_COLOR": "1", "COLUMNS": "120", "TZ": "UTC", "LC_ALL": "C.UTF-8"}

sys.dont_write_bytecode = False  # each task imports the package anew

import runs  # noqa: E402
import shapes  # noqa: E402
import words  # noqa: E402
from world import World  # noqa: E402

import flame_train  # noqa: E402

PARTS = {"runs": runs, "shapes": shapes, "words": words}
Cases = dict[str, Any]
SHOWN = 300
"""Characters of a value that `compare` prints."""


def one(task: tuple[str, str, Path, str]) -> tuple[str, Cases, float]:
    """The cases of a task, in a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has a background job ignore it
    gc.disable()  # when Python frees cycles changes a predicted peak by a thousandth
    part, name, work, only = task
    begun = time.monotonic()
    world = World(work, work / part / name)
    shutil.rmtree(world.own, ignore_errors=True)
    world.own.mkdir(parents=True)
    os.chdir(world.own)
    wanted = {f"{part}/{case}": make for case, make in PARTS[part].cases(world, name).items()}
    found = {case: world.without_places(make()) for case, make in wanted.items() if fnmatch.fnmatch(case, only)}
    shutil.rmtree(world.own)
    return f"{part}/{name}", found, time.monotonic() - begun


def could_match(part: str, name: str, only: str) -> bool:
    """Whether a task may have a case that the glob takes."""
    path, begins = f"{part}/{name}/", re.split(r"[*?[]", only)[0]
    return path.startswith(begins) or begins.startswith(path)


def record(file: Path, work: Path, parts: list[str], only: str, workers: int) -> None:
    """Adds the cases of `parts` to `file`."""
    world = World(work, work)
    tasks = [(part, name, work, only) for part in parts for name in PARTS[part].TASKS if could_match(part, name, only)]
    world.prepare(published="shapes" in parts)
    cases: Cases = json.loads(file.read_text())["cases"] if file.exists() else {}
    cases |= {f"inputs/{name}": {"hash": value} for name, value in world.inputs().items()}
    begun, how = time.monotonic(), multiprocessing.get_context("fork")
    with how.Pool(workers, maxtasksperchild=1) as pool:
        for i, (name, found, seconds) in enumerate(pool.imap_unordered(one, tasks, chunksize=1), 1):
            cases |= found
            write(file, cases)
            print(f"{i}/{len(tasks)}  {name}  {len(found)} cases in {seconds:.0f} s", flush=True)
    refused = Counter(name.split("/")[0] for name, value in cases.items() if value.get("code"))
    for part, number in Counter(name.split("/")[0] for name in cases).items():
        print(f"{part}: {number} cases, {refused[part]} of them refused")
    print(f"{file}: {time.monotonic() - begun:.0f} s")


def write(file: Path, cases: Cases) -> None:
    """Writes the record."""
    ordered = {name: cases[name] for name in sorted(cases)}
    text = json.dumps({"of": str(Path(flame_train.__file__).parent), "cases": ordered}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    begun = file.with_suffix(".begun")
    begun.write_text(f"{text}\n")
    begun.replace(file)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a value with their paths."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{path} > {name}" if path else name)
    elif isinstance(value, list) and value:
        for i, inner in enumerate(value):
            yield from flat(inner, f"{path}[{i}]")
    else:
        yield path, value


def compare(before: Path, after: Path, only: str) -> int:
    """Prints what differs; the number of cases with a difference."""
    sides = [json.loads(file.read_text())["cases"] for file in (before, after)]
    old, new = ({name: v for name, v in side.items() if fnmatch.fnmatch(name, only)} for side in sides)
    different = 0
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: in {after if name in new else before} alone")
        elif old[name] != new[name]:
            print(name)
            a, b = dict(flat(old[name])), dict(flat(new[name]))
            for path in [path for path in a | b if a.get(path) != b.get(path)]:
                lines = [str(side.get(path)).splitlines() for side in (a, b)]
                changes = [line for line in difflib.ndiff(*lines) if line[0] in "-+"]
                print("\n".join([f"  {path}", *(f"    {line[:SHOWN]}" for line in changes)]))
        else:
            continue
        different += 1
    print(f"{different} of {len(old.keys() | new.keys())} cases differ")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("record")
    made.add_argument("file", type=Path)
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "flame-behaviour")
    made.add_argument("--part", action="append", choices=PARTS)
    made.add_argument("--workers", type=int, default=2)
    compared = commands.add_parser("compare")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    for each in (made, compared):
        each.add_argument("--only", default="*", help="a glob over the cases")
    args = parser.parse_args()
    if args.command == "compare":
        sys.exit(1 if compare(args.before, args.after, args.only) else 0)
    record(args.file.resolve(), args.work.resolve(), args.part or [*PARTS], args.only, args.workers)


if __name__ == "__main__":
    main()
