"""Whether runs that are killed and continued give the bytes of runs that were not, for each way to train.

    flame-train quickstart QUICKSTART --device cuda
    python scripts/kill_and_continue.py QUICKSTART FOLDER [optimizer.name=lion "loss.kind=huber train.seed=1" ...]

Each argument after FOLDER is one way to train; without one, every optimizer, schedule, loss and kind of adapter.
A way is settings on top of QUICKSTART's config, which is read without the sections whose keys follow from a choice.
Each way is trained twice: once without a stop, and once killed by SIGKILL after its first checkpoint and started again.
The LoRAs' tensors must have the same bits. `--at-once` says how many ways share the machine. Exits with 1 where one
differs.

    python scripts/kill_and_continue.py QUICKSTART FOLDER --ranks 2 --kills 30 --device cpu schedule.name=constant

`--ranks` starts so many processes by mpirun, and kills each by turns, at a random moment of the run, loading included.
`--kills` says how often each way is begun anew, killed and continued. All processes must end within a minute of a kill.
"""

from __future__ import annotations

import argparse
import contextlib
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
from lora_differences import CONFIG, VERSION, differences

from flame_train.adapters.kinds import ADAPTERS
from flame_train.diffusion.losses import LOSSES
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES

STEPS = 60
"""Steps of a run, unless `--steps` says others; it saves a checkpoint after each third of them."""

TOGETHER = 60.0
"""Seconds within which all processes of a run must have ended after one was killed."""

LEFT_OUT = ("optimizer", "schedule", "loss", "sample", "captions")
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

    def __init__(
        self, config: Path, folder: Path, settings: list[str], device: str, steps: int, ranks: int = 1
    ) -> None:
        self.ranks = ranks
        self.last, self.every = steps, max(steps // 3, 1)
        self.folder, self.log = folder, folder.with_suffix(".log")
        mine = [f"output.dir={folder}", f"train.steps={steps}", f"checkpoint.every={self.every}", "sample.every=0"]
        mine.append("output.precision=fp32")  # in 16 bits most differences would not show
        self.command = [sys.executable, "-m", "flame_train", "train", "--config", str(config), "--device", device]
        self.command += [part for setting in (*mine, *settings) for part in ("--set", setting)]
        if ranks > 1:
            self.command += ["--gpus", str(ranks)]

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log)

    def kill(self, launched: subprocess.Popen[bytes], rank: int) -> float:
        """SIGKILL to the process, or to one of those that mpirun started. Returns the seconds until all have ended."""
        started = psutil.Process(launched.pid).children(recursive=True)
        begun = time.monotonic()
        os.kill(ranks_of(started).get(rank, launched.pid), signal.SIGKILL)
        launched.wait()
        psutil.wait_procs(started)
        return time.monotonic() - begun

    def steps(self) -> int:
        """Steps in the log: the last line that is whole."""
        try:
            lines = (self.folder / "log.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1]).get("step", 0)) if lines else 0


def ranks_of(started: list[psutil.Process]) -> dict[int, int]:
    """The process of each rank, by what mpirun set in its environment."""
    found: dict[int, int] = {}
    for process in started:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            rank = process.environ().get("OMPI_COMM_WORLD_RANK", process.environ().get("PMI_RANK"))
            if rank is not None:
                found.setdefault(int(rank), process.pid)
    return found


def killed(run: _Run, chosen: random.Random, rank: int, seconds: float) -> float | None:
    """Starts the run and kills it. Returns the seconds until all processes had ended; None: it was over before.

    One process is killed after its first checkpoint; of several, one at any moment of the `seconds` that a run takes.
    """
    at, moment = chosen.randint(run.every + 1, max(run.last - 5, run.every + 1)), chosen.uniform(0, seconds)
    process, begun = run.start(), time.monotonic()
    while process.poll() is None and (run.steps() < at if run.ranks == 1 else time.monotonic() - begun < moment):
        time.sleep(0.005)
    return run.kill(process, rank) if process.poll() is None else None


def check(config: Path, folder: Path, index: int, settings: list[str], args: argparse.Namespace) -> tuple[str, str]:
    """One way to train: the way, and what came of it; "same" is what is wanted."""
    name, way, begun = f"{index:03d}", " ".join(settings) or "as it is", time.monotonic()
    whole = _Run(config, folder / f"{name}-whole", settings, args.device, args.steps, args.ranks)
    code = whole.start().wait()
    if code:
        return way, f"ended with {code}: {whole.log.read_text()[-600:]}"
    seconds, came, chosen = time.monotonic() - begun, [], random.Random(index)
    while len(came) < 2 * args.kills and sum(ended is not None for ended in came) < args.kills:
        kill = len(came)
        cut = _Run(config, folder / f"{name}-cut-{kill:02d}", settings, args.device, args.steps, args.ranks)
        came.append(killed(cut, chosen, kill % args.ranks, seconds))
        wrong = compared(whole, cut)
        if not wrong and (came[-1] or 0) > TOGETHER:
            wrong = f"after the kill the last process ended {came[-1]:.0f} s later"
        if wrong:
            return way, f"kill {kill}: {wrong}"
    in_time = [ended for ended in came if ended is not None]
    if in_time:
        print(f"{way}: {len(in_time)} kills, all the same, ended within {max(in_time):.1f} s", flush=True)
    return way, "same" if len(in_time) == args.kills else LATE


def compared(whole: _Run, cut: _Run) -> str:
    """Continues a run that was killed. Returns what is wrong with its LoRA; "": nothing."""
    code = cut.start().wait()
    if code:
        return f"continued, it ended with {code}: {cut.log.read_text()[-600:]}"
    files = [run.folder / "lora.safetensors" for run in (whole, cut)]
    found = differences(files[0], files[1], IGNORED)
    if not found:
        shutil.rmtree(cut.folder)
    return f"{len(found)} differences: {found[0]}" if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ways", nargs="*", help="settings of one way to train, with spaces between them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_intermixed_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(args.quickstart, folder / "config.toml")
    with ThreadPoolExecutor(args.at_once) as pool:
        tries = [
            pool.submit(check, config, folder, index, way.split(), args)
            for index, way in enumerate(args.ways or every_way())
        ]
        results = [each.result() for each in tries]
    for way, result in results:
        print(f"{way}: {result}")
    sys.exit(0 if all(result == "same" for _, result in results) else 1)


if __name__ == "__main__":
    main()
