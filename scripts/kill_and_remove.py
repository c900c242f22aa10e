"""Whether runs whose machine is taken away give the bytes of one that was left alone.

    python scripts/kill_and_remove.py CONFIG FOLDER [--kills 50] [--steps 120] [--every 30] [--device cpu]

CONFIG is a config whose model and images are on this machine, such as that of a quickstart. Each run has a copy in
moto's S3 server. It is killed by SIGKILL at a random moment, its run folder is removed, and the same command starts
on the empty folder, until it ends; then another run begins, until there were so many kills. Every run must end with
the LoRA, the last checkpoint and the log of an uninterrupted one. Said is how many steps were done again after each
kill: those since the newest checkpoint that was whole in the store. Exits with 1 where a run differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from store_servers import S3, moto

TIMES = ("images_per_s", "data_wait_ms", "memory")


@dataclass(frozen=True)
class Run:
    """A run folder, its copy, and the command that starts or continues it."""

    config: Path
    folder: Path
    s3: S3
    remote: str
    settings: tuple[str, ...]
    device: str

    def start(self) -> subprocess.Popen[bytes]:
        mine = (f"output.dir={self.folder}", f"output.remote={self.remote}", *self.settings)
        command = [sys.executable, "-m", "flame_train", "train", "--config", str(self.config), "--device", self.device]
        command += [part for setting in mine for part in ("--set", setting)]
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | self.s3.environment())

    def step(self) -> int:
        """The last step whose line is whole; 0 before the first."""
        try:
            lines = (self.folder / "log.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def result(self) -> dict[str, str]:
        """Hashes of the LoRA, of the files of the last checkpoint, and of the log without times."""
        newest = max((self.folder / "checkpoints").glob("step-*"))
        found = {path.name: digest(path.read_bytes()) for path in [self.folder / "lora.safetensors", *newest.iterdir()]}
        lines = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        kept = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
        return found | {"log": digest(json.dumps(kept).encode())}


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def in_store(s3: S3, remote: str) -> int:
    """The step of the newest checkpoint there that has a manifest; 0 without one."""
    import fsspec

    store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    found = store.glob(f"{remote.removeprefix('s3://')}/checkpoints/step-*/MANIFEST.json")
    return max((int(path.split("/")[-2].removeprefix("step-")) for path in found), default=0)


def kill_until_done(run: Run, chosen: random.Random, seconds: float, left: int) -> list[int]:
    """Starts a run until it ends, with at most `left` kills: how many steps were done again after each."""
    again = list[int]()
    while True:
        process, begun, moment = run.start(), time.monotonic(), chosen.uniform(0, seconds)
        killing = len(again) < left
        while process.poll() is None and not (killing and time.monotonic() - begun > moment):
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            if process.returncode:
                raise SystemExit(f"{run.folder}: ended with {process.returncode}, see {run.folder}.log")
            return again
        reached = run.step()
        again.append(max(0, reached - in_store(run.s3, run.remote)))
        print(f"killed after {time.monotonic() - begun:.1f} s at step {reached}, {again[-1]} steps again", flush=True)
        shutil.rmtree(run.folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = (f"train.steps={args.steps}", f"checkpoint.every={args.every}", "sample.every=0", "output.title=a run")
    chosen, again, runs = random.Random(50), list[int](), 0
    with moto() as s3:
        os.environ.update(s3.environment())
        whole = Run(args.config, folder / "whole", s3, "s3://runs/whole", settings, args.device)
        begun = time.monotonic()
        if whole.start().wait():
            raise SystemExit(f"the uninterrupted run failed, see {whole.folder}.log")
        seconds, wanted = time.monotonic() - begun, whole.result()
        while len(again) < args.kills:
            run = Run(args.config, folder / f"run-{runs:02d}", s3, f"s3://runs/{runs:02d}", settings, args.device)
            again += kill_until_done(run, chosen, seconds, args.kills - len(again))
            found = run.result()
            wrong = sorted(name for name in wanted if found.get(name) != wanted[name])
            print(f"run {runs}: {'the same bytes' if not wrong else f'other {wrong}'}", flush=True)
            if wrong:
                sys.exit(1)
            shutil.rmtree(run.folder)
            runs += 1
    within = sum(steps <= args.every for steps in again)
    print(
        f"{len(again)} kills in {runs} runs, all with the same bytes; steps done again: at most {max(again)}, "
        f"within checkpoint.every = {args.every} after {within} kills"
    )


if __name__ == "__main__":
    main()
