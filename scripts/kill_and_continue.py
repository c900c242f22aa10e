"""Whether runs that are killed and continued give the bytes of runs that were not, for each way to train.

    flame-train quickstart QUICKSTART --device cuda
    python scripts/kill_and_continue.py QUICKSTART FOLDER [optimizer.name=lion "loss.kind=huber train.seed=1" ...]

Each argument after FOLDER is one way to train; without one, every optimizer, schedule, loss and kind of adapter.
A way is settings on top of QUICKSTART's config, which is read without the sections whose keys follow from a choice.
Each way is trained twice: once without a stop, and once killed by SIGKILL after its first checkpoint and started again.
The LoRAs' tensors must have the same bits. `--at-once` says how many ways share the machine. Exits with 1 where one
differs.

    python scripts/kill_and_continue.py QUICKSTART FOLDER --ranks 2 --kills 30 --device cpu schedule.name=constant

`--ranks` starts so many processes by mpirun, and kills a random one at a random moment of the run, loading included.
`--kills` says how often each way is begun anew, killed and continued.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from same_bits import CONFIG, VERSION, differences

from flame_train.adapters.kinds import ADAPTERS
from flame_train.diffusion.losses import LOSSES
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES

STEPS, EVERY = 60, 20
"""Steps of a run, and the interval of its checkpoints."""

LEFT_OUT = ("optimizer", "schedule", "loss", "sample")
"""Sections of the quickstart's config that a way to train begins without."""

LATE = "not killed in time"

IGNORED = VERSION | CONFIG | {"modelspec.title", "ss_output_name"}
"""Metadata that differ: the title is the run folder's name."""


def every_way() -> list[str]:
    """A way for each entry of the tables that any family of quickstarts can choose from."""
    return [
        *(f"optimizer.name={name} schedule.name=constant" for name in OPTIMIZERS),
        *(f"schedule.name={name}" for name in SCHEDULES),
        *(f"loss.kind={name}" for name in LOSSES),
        *(f"lora.kind={name}" for name in ADAPTERS if name != "locon"),
        'lora.kind=locon lora.targets=["full"]',  # it wants convolutions
    ]


def write_config(quickstart: Path, path: Path) -> Path:
    """The quickstart's config without the sections that are left out."""
    sections = re.split(r"(?m)^(?=\[)", (quickstart / "config.toml").read_text())
    kept = [text for text in sections if not text.startswith(tuple(f"[{name}]" for name in LEFT_OUT))]
    path.write_text("".join(kept))
    return path


class _Run:
    """One run folder, and the command that starts or continues it."""

    def __init__(self, config: Path, folder: Path, settings: list[str], device: str, ranks: int = 1) -> None:
        self.ranks = ranks
        self.folder, self.log = folder, folder.with_suffix(".log")
        mine = [f"output.dir={folder}", f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "sample.every=0"]
        mine.append("output.precision=fp32")  # in 16 bits most differences would not show
        self.command = [sys.executable, "-m", "flame_train", "train", "--config", str(config), "--device", device]
        self.command += [part for setting in (*mine, *settings) for part in ("--set", setting)]
        if ranks > 1:
            self.command += ["--gpus", str(ranks)]

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self, launched: subprocess.Popen[bytes], chosen: random.Random) -> None:
        """SIGKILL to the process, or to one of those that mpirun started; returns when all have ended."""
        pids = [launched.pid]
        if self.ranks > 1:
            children = psutil.Process(launched.pid).children(recursive=True)
            pids = [child.pid for child in children if "flame_train" in child.cmdline()] or pids
        os.kill(chosen.choice(pids), signal.SIGKILL)
        launched.wait()

    def steps(self) -> int:
        """Steps in the log: the last line that is whole."""
        try:
            lines = (self.folder / "log.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1]).get("step", 0)) if lines else 0


def killed_and_continued(run: _Run, chosen: random.Random, seconds: float) -> tuple[int, bool]:
    """Kills the run and continues it: the exit code, and whether it was killed in time.

    One process is killed after its first checkpoint; of several, one at any moment of the `seconds` that a run takes.
    """
    at, moment = chosen.randint(EVERY + 1, STEPS - 5), chosen.uniform(0, seconds)
    process, begun = run.start(), time.monotonic()
    while process.poll() is None and (run.steps() < at if run.ranks == 1 else time.monotonic() - begun < moment):
        time.sleep(0.005)
    in_time = process.poll() is None
    if in_time:
        run.kill(process, chosen)
    return run.start().wait(), in_time


def check(
    config: Path, folder: Path, index: int, settings: list[str], device: str, ranks: int = 1, kills: int = 1
) -> tuple[str, str]:
    """One way to train: the way, and what came of it; "same" is what is wanted."""
    name, way, begun = f"{index:03d}", " ".join(settings) or "as it is", time.monotonic()
    whole = _Run(config, folder / f"{name}-whole", settings, device, ranks)
    code = whole.start().wait()
    if code:
        return way, f"ended with {code}: {whole.log.read_text()[-600:]}"
    seconds, came = time.monotonic() - begun, []
    for kill in range(kills):
        cut = _Run(config, folder / f"{name}-cut-{kill:02d}", settings, device, ranks)
        came.append(compared(whole, cut, random.Random(f"{index} {kill}"), seconds))
        if came[-1] not in ("same", LATE):
            return way, f"kill {kill}: {came[-1]}"
    print(f"{way}: {came.count('same')} of {kills} killed in time, all the same", flush=True)
    return way, "same" if "same" in came else LATE


def compared(whole: _Run, cut: _Run, chosen: random.Random, seconds: float) -> str:
    """What came of a run that was killed and continued."""
    code, in_time = killed_and_continued(cut, chosen, seconds)
    if code:
        return f"continued, it ended with {code}: {cut.log.read_text()[-600:]}"
    files = [run.folder / "lora.safetensors" for run in (whole, cut)]
    found = differences(files[0], files[1], IGNORED)
    same = "same" if in_time else LATE
    if not found:
        shutil.rmtree(cut.folder)
    return f"{len(found)} differences: {found[0]}" if found else same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ways", nargs="*", help="settings of one way to train, with spaces between them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1)
    args = parser.parse_intermixed_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(args.quickstart, folder / "config.toml")
    with ThreadPoolExecutor(args.at_once) as pool:
        tries = [
            pool.submit(check, config, folder, index, way.split(), args.device, args.ranks, args.kills)
            for index, way in enumerate(args.ways or every_way())
        ]
        results = [each.result() for each in tries]
    for way, result in results:
        print(f"{way}: {result}")
    sys.exit(0 if all(result == "same" for _, result in results) else 1)


if __name__ == "__main__":
    main()
